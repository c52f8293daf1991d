//! Addresses on the command line: engines' base URLs and where to listen.

use crate::routing::InstanceSpec;

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
}

/// Parses `URL[,dp=N][,rank0=K]`.
pub(super) fn worker(text: &str) -> Result<Worker, String> {
    let mut parts = text.split(',');
    let url = parts.next().unwrap_or_default();
    let base = base_url(url)?;
    let mut dp = None;
    let mut rank0 = None;
    for part in parts {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("`{part}` is not key=value; keys are dp and rank0"))?;
        let (slot, low, high) = match key {
            "dp" => (&mut dp, 1, 1_024),
            "rank0" => (&mut rank0, 0, 1_000_000),
            _ => return Err(format!("unknown key `{key}`; keys are dp and rank0")),
        };
        if slot.is_some() {
            return Err(format!("`{key}` is given twice"));
        }
        let number: u32 = value
            .parse()
            .ok()
            .filter(|number| (low..=high).contains(number))
            .ok_or_else(|| format!("{key} must be {low} to {high}, not `{value}`"))?;
        *slot = Some(number);
    }
    Ok(Worker {
        spec: InstanceSpec {
            url: url.trim_end_matches('/').to_owned(),
            dp: dp.unwrap_or(1),
            rank0: rank0.unwrap_or(0),
        },
        base,
    })
}

fn base_url(url: &str) -> Result<BaseUrl, String> {
    let uri: http::Uri = url.parse().map_err(|error| format!("not a URL: {error}"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => return Err("https is not available yet in this build".to_owned()),
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
