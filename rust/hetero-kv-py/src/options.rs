//! What Python hands over at start, as one JSON text each.

use std::num::NonZeroU32;
use std::time::Duration;

use hetero_kv_core::auth::{Keys, SETTING};
use hetero_kv_core::consumer::ConsumerOptions;
use hetero_kv_core::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank};
use hetero_kv_core::layout::{CompatFields, KvHeads, field};
use hetero_kv_core::plan::{SourcePolicy, Striping};
use hetero_kv_core::producer::LeaseTimes;
use hetero_kv_core::wire::message::EngineIdentity;
use hetero_kv_core::wire::params::PARAMS_VERSION;
use hetero_kv_transport::keys;
use hetero_kv_transport::net::listen::ListenAddress;
use hetero_kv_transport::reader::{ReaderOptions, TransportChoice};
use hetero_kv_transport::registration::RegistrationOptions;
use hetero_kv_transport::scheduler::Roles;
use hetero_kv_transport::tcp::ServerOptions;
use hetero_kv_transport::verbs::{DeviceChoice, VerbsOptions};
use hetero_kv_transport::worker::{VerbsUse, WorkerOptions, WorkerPlace};
use serde::Deserialize;
use serde_json::{Value, json};

/// The settings of `kv_connector_extra_config`, already checked by `hetero_kv.config`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    pub(crate) host: String,
    pub(crate) bind_host: Option<String>,
    pub(crate) port_range: Option<(u16, u16)>,
    pub(crate) transport: String,
    /// Empty: the first device that can be used.
    pub(crate) verbs_device: String,
    /// 0: the first active one.
    pub(crate) verbs_port: u8,
    /// -1: by the kind of address.
    pub(crate) verbs_gid_index: i16,
    pub(crate) verbs_queue_pairs: usize,
    pub(crate) verbs_busy_poll_us: u64,
    pub(crate) allow_ptracer: bool,
    pub(crate) require_kv: bool,
    pub(crate) lease_s: f64,
    pub(crate) grace_ms: f64,
    pub(crate) margin_ms: f64,
    pub(crate) claim_timeout_s: f64,
    pub(crate) load_timeout_s: f64,
    pub(crate) sibling_linger_ms: f64,
    pub(crate) heartbeat_s: f64,
    pub(crate) peer_silence_s: f64,
    pub(crate) quiesce_timeout_s: f64,
    pub(crate) lease_slots: u32,
    pub(crate) source_policy: SourcePolicy,
    pub(crate) stripe_bytes_min: u64,
    pub(crate) stripe_sources_max: u32,
    pub(crate) readers_max: u32,
    pub(crate) sources_max: u32,
    /// Addresses of prefill engines to pair with at start.
    pub(crate) connect: Vec<(String, u16)>,
    /// Empty: peers prove nothing.
    pub(crate) control_key_file: String,
}

/// An engine, from vLLM's configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Engine {
    pub(crate) engine_id: EngineId,
    pub(crate) dp_rank: u32,
    pub(crate) dp_size: u32,
    pub(crate) tp_size: u32,
    pub(crate) pp_size: u32,
    pub(crate) block_size: u32,
    /// KV heads over all ranks; 0 for MLA.
    pub(crate) kv_heads: u32,
    pub(crate) producer: bool,
    pub(crate) consumer: bool,
}

/// For [`crate::scheduler::Scheduler`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SchedulerStart {
    pub(crate) settings: Settings,
    pub(crate) engine: Engine,
    pub(crate) fields: CompatFields,
    /// Where to register, if anywhere.
    #[serde(default)]
    pub(crate) registration: Option<RegistrationStart>,
}

/// What this engine tells the proxy of itself.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegistrationStart {
    proxy_url: String,
    public_url: String,
    /// `prefill` or `decode`.
    role: String,
    /// DP ranks behind `public_url`.
    dp: u32,
    interval_s: f64,
    key_file: Option<String>,
    /// Names under which the engine serves its model.
    models: Vec<String>,
    /// What is known before the start.
    kv: serde_json::Map<String, Value>,
}

impl RegistrationStart {
    /// With what is known since the start: `identity`, and where its control listener is.
    ///
    /// # Errors
    /// A key file that cannot be read.
    pub(crate) fn options(
        self,
        identity: &EngineIdentity,
        control: Option<(&str, u16)>,
        block_size: u32,
        fields: &CompatFields,
    ) -> Result<RegistrationOptions, String> {
        let incarnation = format!("{:016x}", identity.incarnation.0);
        let mut kv = self.kv;
        let mut tell = |name: &str, value: Value| kv.insert(name.to_owned(), value);
        tell("engine_id", json!(identity.engine.as_str()));
        tell("incarnation", json!(incarnation));
        tell("params_version", json!(PARAMS_VERSION));
        tell("dp_rank", json!(identity.dp_rank.0));
        tell("dp_size", json!(identity.dp_size));
        tell("tp_size", json!(identity.tp_size));
        tell("pp_size", json!(identity.pp_size));
        tell("block_size", json!(block_size));
        if let Some((host, port)) = control {
            let control = match host.contains(':') {
                true => format!("[{host}]:{port}"),
                false => format!("{host}:{port}"),
            };
            tell("control", json!(control));
        }
        let keys = self
            .key_file
            .as_deref()
            .map(|path| keys::read(path.as_ref()));
        let interval = seconds(self.interval_s);
        let mut body = json!({
            "role": self.role,
            "url": self.public_url,
            "dp": self.dp,
            "engine_id": incarnation,
            "heartbeat_interval_ms": interval.as_millis() as u64,
            "compat": fields,
        });
        // By these the proxy pairs workers before a leg is sent.
        let told = |name: &str| fields.get(name).map(str::to_owned);
        let pairing = [
            ("model", Some(self.models.join("|"))),
            ("revision", told(field::REVISION).filter(|it| it != "none")),
            ("dtype", told(field::KV_CACHE_DTYPE)),
            // MLA states 0: its one latent is no head, and the proxy takes none for a number.
            ("kv_heads", told(field::KV_HEADS).filter(|it| it != "0")),
            // Words; a worker's field has no blanks.
            (
                "layout",
                told(field::PAGE_FORMAT).map(|it| it.replace([' ', ','], "_")),
            ),
            (
                "mode",
                kv.get("mode").and_then(Value::as_str).map(str::to_owned),
            ),
            (
                "control",
                kv.get("control").and_then(Value::as_str).map(str::to_owned),
            ),
        ];
        for (name, value) in pairing {
            if let Some(value) = value.filter(|value| is_plain(value)) {
                body[name] = json!(value);
            }
        }
        body["kv"] = Value::Object(kv);
        Ok(RegistrationOptions {
            body,
            proxy_url: self.proxy_url,
            interval,
            keys: (keys.transpose()).map_err(|fault| format!("register_key_file: {fault}"))?,
        })
    }
}

/// For [`crate::worker::Worker`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerStart {
    pub(crate) settings: Settings,
    pub(crate) engine: Engine,
    pub(crate) tp_rank: u32,
    pub(crate) pp_rank: u32,
}

/// Whether a text can stand in a worker's field at the proxy; what cannot is not told.
fn is_plain(text: &str) -> bool {
    const BYTES_MAX: usize = 512;
    let byte_ok = |byte: u8| byte.is_ascii_graphic() && byte != b',';
    (1..=BYTES_MAX).contains(&text.len()) && text.bytes().all(byte_ok)
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}

fn millis(value: f64) -> Duration {
    seconds(value / 1e3)
}

impl Settings {
    pub(crate) fn address(&self, engine: &Engine) -> ListenAddress {
        ListenAddress {
            host: self.host.clone(),
            bind_host: self.bind_host.clone(),
            port_range: self.port_range.map(|(first, last)| first..=last),
            // The control listener and the ranks' data listeners share the range.
            ports_needed: 1 + engine.tp_size.saturating_mul(engine.pp_size),
        }
    }

    /// What peers prove to each other.
    ///
    /// # Errors
    /// A sentence that names the setting, the file and what is wrong with it.
    pub(crate) fn keys(&self) -> Result<Option<Keys>, String> {
        let path = &self.control_key_file;
        (!path.is_empty())
            .then(|| keys::read(path.as_ref()))
            .transpose()
            .map_err(|fault| format!("{SETTING}: {fault}"))
    }

    pub(crate) fn leases(&self) -> LeaseTimes {
        LeaseTimes {
            lease: seconds(self.lease_s),
            renewal: seconds(self.lease_s),
            grace: millis(self.grace_ms),
        }
    }

    pub(crate) fn consumer(&self, block_size: u32) -> ConsumerOptions {
        ConsumerOptions {
            block_size,
            require_kv: self.require_kv,
            claim_timeout: seconds(self.claim_timeout_s),
            load_timeout: seconds(self.load_timeout_s),
            margin: millis(self.margin_ms),
            sibling_linger: millis(self.sibling_linger_ms),
            heartbeat: seconds(self.heartbeat_s),
            peer_silence: seconds(self.peer_silence_s),
            backoff: Duration::from_millis(250),
            source_policy: self.source_policy,
        }
    }

    fn striping(&self) -> Striping {
        match self.stripe_bytes_min {
            0 => Striping::OFF,
            bytes => Striping {
                threshold_bytes: bytes,
                holders_max: self.stripe_sources_max,
            },
        }
    }

    fn verbs(&self) -> VerbsUse {
        let options = VerbsOptions {
            choice: DeviceChoice {
                device: Some(self.verbs_device.clone()).filter(|name| !name.is_empty()),
                port: Some(self.verbs_port).filter(|port| *port != 0),
                gid_index: u8::try_from(self.verbs_gid_index).ok(),
            },
            queue_pairs: self.verbs_queue_pairs,
            busy_poll: Duration::from_micros(self.verbs_busy_poll_us),
        };
        match self.transport.as_str() {
            "verbs" => VerbsUse::Required(options),
            "auto" => VerbsUse::IfThere(options),
            _ => VerbsUse::Off,
        }
    }

    fn offers(&self, transport: &str) -> bool {
        self.transport == "auto" || self.transport == transport
    }
}

impl Engine {
    pub(crate) fn heads(&self) -> KvHeads {
        NonZeroU32::new(self.kv_heads).map_or(KvHeads::Latent, KvHeads::Grouped)
    }

    pub(crate) fn roles(&self) -> Roles {
        Roles {
            producer: self.producer,
            consumer: self.consumer,
        }
    }

    pub(crate) fn identity(&self, incarnation: Incarnation) -> EngineIdentity {
        EngineIdentity {
            engine: self.engine_id.clone(),
            incarnation,
            dp_rank: DpRank(self.dp_rank),
            tp_size: self.tp_size,
            pp_size: self.pp_size,
            dp_size: self.dp_size,
        }
    }
}

impl WorkerStart {
    pub(crate) fn place(&self) -> WorkerPlace {
        WorkerPlace {
            engine: self.engine.engine_id.clone(),
            dp_rank: DpRank(self.engine.dp_rank),
            tp_rank: TpRank(self.tp_rank),
            tp_size: self.engine.tp_size,
            pp_rank: PpRank(self.pp_rank),
            pp_size: self.engine.pp_size,
            heads: self.engine.heads(),
        }
    }

    /// # Errors
    /// A key file that cannot be used.
    pub(crate) fn options(&self) -> Result<WorkerOptions, String> {
        let settings = &self.settings;
        let keys = settings.keys()?;
        Ok(WorkerOptions {
            roles: self.engine.roles(),
            server: ServerOptions {
                address: settings.address(&self.engine),
                connections_max: settings.readers_max as usize,
                keys: keys.clone(),
                ..ServerOptions::default()
            },
            reader: ReaderOptions {
                choice: match settings.transport.as_str() {
                    "process" => TransportChoice::Process,
                    "verbs" => TransportChoice::Verbs,
                    "tcp" => TransportChoice::Tcp,
                    "mori" => TransportChoice::Mori,
                    _ => TransportChoice::Auto,
                },
                quiesce_timeout: seconds(settings.quiesce_timeout_s),
                sessions_max: settings.sources_max as usize,
                keys,
                ..ReaderOptions::default()
            },
            allow_ptracer: settings.allow_ptracer,
            lease_slots: settings.lease_slots,
            offer_process: settings.offers("process"),
            offer_tcp: settings.offers("tcp"),
            verbs: settings.verbs(),
            mori: None,
            block_size: self.engine.block_size,
            striping: settings.striping(),
        })
    }
}
