//! Addresses on the command line: engines' base URLs and where to listen.

use crate::connectors::{PeerSpec, WORKER_KEYS, ZmqAddress};
use crate::routing::{Field, InstanceSpec, LOOPBACK, NETWORK, Traits, WORKER_WEIGHT_MAX};

/// Base URL of one engine, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseUrl {
    /// Name or address to dial, without brackets.
    pub host: String,
    /// Port to dial.
    pub port: u16,
    /// `Host` header: as written, with brackets and port.
    pub authority: String,
    /// Path in front of the API's paths, without a slash at its end.
    pub path: String,
}

/// One engine instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// What routing needs to know.
    pub spec: InstanceSpec,
    /// Where it is.
    pub base: BaseUrl,
    /// How much each of its ranks gets beside those of others, where that is told.
    pub weight: Option<u32>,
    /// What the connector needs to know.
    pub peer: PeerSpec,
    /// What it tells of itself, for its peers to agree on.
    pub traits: Traits,
    /// `HOST:PORT` of its connector's control plane, where it tells it.
    pub control: Option<String>,
}

/// Ports of vLLM's own defaults.
const HANDSHAKE_PORT: u16 = 6301;
const NOTIFY_PORT: u16 = 61005;
const BOOTSTRAP_PORT: u16 = 8998;

/// What is wrong with a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerFault {
    /// The key at fault, as the flags spell it; `url` for the URL, none for the whole.
    pub(crate) key: Option<&'static str>,
    /// A sentence.
    pub(crate) text: String,
}

impl WorkerFault {
    fn of(key: &'static str, text: impl Into<String>) -> Self {
        Self {
            key: Some(key),
            text: text.into(),
        }
    }
}

/// The keys of a worker beside its URL.
pub(crate) fn keys() -> impl Iterator<Item = &'static str> + Clone {
    let traits = Field::ALL.into_iter().map(Field::key);
    ["dp", "rank0", "weight"]
        .into_iter()
        .chain(WORKER_KEYS)
        .chain(traits)
}

/// Longest value that a worker tells of itself.
const TRAIT_BYTES_MAX: usize = 512;

/// What a worker tells of itself, and its control address.
fn traits<'a>(
    text: impl Fn(&str) -> Option<&'a str>,
) -> Result<(Traits, Option<String>), WorkerFault> {
    let mut traits = Traits::default();
    for field in Field::ALL {
        let key = field.key();
        let Some(value) = text(key) else {
            continue;
        };
        let plain = value.bytes().all(|byte| byte.is_ascii_graphic());
        if value.is_empty() || value.len() > TRAIT_BYTES_MAX || !plain {
            return Err(WorkerFault::of(
                key,
                format!("{key} must be 1 to {TRAIT_BYTES_MAX} visible ASCII characters"),
            ));
        }
        let told = match field {
            Field::Control => reach(value).map_err(|fault| WorkerFault::of(key, fault))?,
            Field::KvHeads if !value.parse::<u32>().is_ok_and(|heads| heads > 0) => {
                let fault = format!("kv-heads must be a number of heads, not `{value}`");
                return Err(WorkerFault::of(key, fault));
            }
            Field::Model
            | Field::Revision
            | Field::Dtype
            | Field::KvHeads
            | Field::Layout
            | Field::Mode => value,
        };
        traits = traits.with(field, told);
    }
    Ok((traits, text(Field::Control.key()).map(str::to_owned)))
}

/// Which peers reach a control address.
fn reach(control: &str) -> Result<&'static str, String> {
    let (host, port) = host_port(control).map_err(|fault| format!("control: {fault}"))?;
    let address: Option<std::net::IpAddr> = host.parse().ok();
    if port == 0 || address.is_some_and(|address| address.is_unspecified()) {
        return Err(format!(
            "control must be an address that peers can dial, not `{control}`"
        ));
    }
    let own = address.is_some_and(|address| address.is_loopback());
    Ok(match own || host == "localhost" {
        true => LOOPBACK,
        false => NETWORK,
    })
}

/// Refuses an address that means every interface: whoever dials it reaches its own host.
fn dialable(key: &'static str, host: &str) -> Result<(), WorkerFault> {
    let address: Option<std::net::IpAddr> = host.parse().ok();
    match address.is_some_and(|address| address.is_unspecified()) {
        true => Err(WorkerFault::of(
            key,
            format!(
                "{key}: `{host}` means every interface and nobody can dial it; name the engine's own \
                 address"
            ),
        )),
        false => Ok(()),
    }
}

/// Parses `URL[,key=value...]`; for the keys see [`keys`].
pub(super) fn worker(text: &str) -> Result<Worker, String> {
    let mut parts = text.split(',');
    let url = parts.next().unwrap_or_default();
    let mut given: Vec<(&'static str, &str)> = Vec::new();
    let known = || {
        let keys: Vec<&str> = keys().collect();
        format!("keys are {}", keys.join(", "))
    };
    for part in parts {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("`{part}` is not key=value; {}", known()))?;
        let key = keys()
            .find(|known| *known == key)
            .ok_or_else(|| format!("unknown key `{key}`; {}", known()))?;
        if given.iter().any(|(known, _)| *known == key) {
            return Err(format!("`{key}` is given twice"));
        }
        given.push((key, value));
    }
    assemble(url, &given).map_err(|fault| fault.text)
}

/// A worker of its URL and its keys, each at most once.
pub(crate) fn assemble(url: &str, given: &[(&'static str, &str)]) -> Result<Worker, WorkerFault> {
    let base = BaseUrl::of_server(url).map_err(|fault| WorkerFault::of("url", fault))?;
    dialable("url", &base.host)?;
    let text = |key: &str| {
        given
            .iter()
            .find(|(known, _)| *known == key)
            .map(|(_, v)| *v)
    };
    let number = |key: &'static str, low: u32, high: u32, default: u32| match text(key) {
        None => Ok(default),
        Some(value) => value
            .parse()
            .ok()
            .filter(|number| (low..=high).contains(number))
            .ok_or_else(|| {
                WorkerFault::of(key, format!("{key} must be {low} to {high}, not `{value}`"))
            }),
    };
    let port = |key: &'static str, default: u16| {
        let value = number(key, 1, u32::from(u16::MAX), u32::from(default))?;
        Ok::<_, WorkerFault>(value as u16)
    };
    let dp = number("dp", 1, 1_024, 1)?;
    let bootstrap = match text("bootstrap") {
        // A port at the instance's own host, or an address.
        Some(port) if !port.contains(':') => format!("{}:{port}", bracketed(&base.host)),
        Some(address) => address.to_owned(),
        None => format!("{}:{BOOTSTRAP_PORT}", bracketed(&base.host)),
    };
    let (bootstrap_host, _) = host_port(&bootstrap)
        .map_err(|fault| WorkerFault::of("bootstrap", format!("bootstrap: {fault}")))?;
    dialable("bootstrap", &bootstrap_host)?;
    let kv_host = text("kv-host").unwrap_or(&base.host);
    dialable("kv-host", kv_host)?;
    let peer = PeerSpec {
        dp,
        dp_size: number("dp-size", 1, 65_536, dp)?,
        dp_rank0: number("dp-rank0", 0, 65_535, 0)?,
        tp: number("tp", 1, 1_024, 0)?,
        zmq: ZmqAddress {
            host: kv_host.to_owned(),
            handshake: port("handshake", HANDSHAKE_PORT)?,
            notify: port("notify", NOTIFY_PORT)?,
        },
        bootstrap: format!("http://{bootstrap}"),
        given: WORKER_KEYS
            .into_iter()
            .filter(|key| text(key).is_some())
            .collect(),
    };
    let (traits, control) = traits(text)?;
    let weight = number("weight", 0, WORKER_WEIGHT_MAX, 1)?;
    Ok(Worker {
        weight: text("weight").map(|_| weight),
        traits,
        control,
        spec: InstanceSpec {
            url: url.trim_end_matches('/').to_owned(),
            dp,
            rank0: number("rank0", 0, 1_000_000, 0)?,
        },
        base,
        peer,
    })
}

impl BaseUrl {
    /// Takes the base URL of a server apart, to which requests go under their own paths. One that
    /// ends in `/v1`, as clients' libraries want it, is refused: the paths begin with it.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn of_server(url: &str) -> Result<Self, String> {
        let base = base_url(url)?;
        match base.path.ends_with("/v1") {
            true => Err("leave `/v1` out: the paths of requests begin with it".to_owned()),
            false => Ok(base),
        }
    }

    /// Whether both are one address, however it is written.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.host.eq_ignore_ascii_case(&other.host)
            && self.port == other.port
            && self.path == other.path
    }
}

/// A host as it stands in front of a port.
fn bracketed(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

pub(crate) fn base_url(url: &str) -> Result<BaseUrl, String> {
    let uri: http::Uri = url.parse().map_err(|error| format!("not a URL: {error}"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            let way_out = "engines are spoken to without TLS: give the engine's http:// address in \
                           the cluster's own network, and let a TLS terminator beside the engine \
                           serve those outside it; or give the http:// end of a TLS tunnel";
            return Err(way_out.to_owned());
        }
        _ => return Err("a URL begins with http://".to_owned()),
    }
    let authority = uri.authority().ok_or("the URL has no host")?;
    if authority.as_str().contains('@') {
        return Err("a user name in the URL is not supported".to_owned());
    }
    if uri.query().is_some() || url.contains('#') {
        return Err("a base URL has no query and no fragment".to_owned());
    }
    let host = authority
        .host()
        .trim_start_matches('[')
        .trim_end_matches(']');
    let port = match authority.port() {
        Some(port) => port.as_str().parse().ok().filter(|port| *port != 0),
        None if authority.as_str().len() > authority.host().len() => None,
        None => Some(80),
    };
    let port = port.ok_or("the port must be 1 to 65535")?;
    if host.is_empty() {
        return Err("the URL has no host".to_owned());
    }
    Ok(BaseUrl {
        host: host.to_owned(),
        port,
        authority: authority.as_str().to_owned(),
        path: uri.path().trim_end_matches('/').to_owned(),
    })
}

/// Splits `HOST:PORT`, IPv6 in brackets.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn host_port(text: &str) -> Result<(String, u16), String> {
    let (host, port) = text.rsplit_once(':').ok_or("must be HOST:PORT")?;
    let port = port
        .parse()
        .map_err(|_| format!("`{port}` is not a port"))?;
    let bare = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    match bare {
        Some(host) => Ok((host.to_owned(), port)),
        None if host.contains(':') => Err("write an IPv6 address in brackets".to_owned()),
        None if host.is_empty() => Err("must be HOST:PORT; 0.0.0.0 serves on all".to_owned()),
        None => Ok((host.to_owned(), port)),
    }
}
