//! Who may come in where: the listeners and the keys.

use std::path::Path;

use super::faults::{Faults, fill};
use super::host_port;
use crate::auth::keys::Keys;
use crate::auth::{ADMIN_KEY_BYTES_MIN, API_KEY_BYTES_MIN};
use crate::cli::Settings;
use crate::connectors::Connector;

impl Faults {
    /// Where clients come in.
    pub(super) fn listen(&mut self, settings: &mut Settings) -> String {
        let listen = fill(&mut settings.listen, "127.0.0.1:8000");
        if let Err(fault) = host_port(&listen) {
            self.add(format!("--listen {listen}: {fault}"));
        }
        listen
    }

    /// Where administrators come in, apart from the clients on `listen`.
    pub(super) fn admin_listen(&mut self, settings: &Settings, listen: &str) -> Option<String> {
        let admin = settings.admin_listen.as_ref()?;
        if let Err(fault) = host_port(admin) {
            self.add(format!("--admin-listen {admin}: {fault}"));
        }
        if admin == listen && !admin.ends_with(":0") {
            self.add(format!(
                "--admin-listen {admin}: is --listen too; clients must not reach administration"
            ));
        }
        Some(admin.clone())
    }

    fn keys(&mut self, flag: &str, path: Option<&Path>, bytes_min: usize) -> Option<Keys> {
        let read = Keys::read(path?, bytes_min);
        read.map_err(|fault| self.add(format!("{flag} {fault}")))
            .ok()
    }

    /// Keys by which administrators and workers sign.
    pub(super) fn admin_keys(&mut self, settings: &mut Settings) -> Option<Keys> {
        let unsigned = *settings.zmq_unsigned.get_or_insert(false);
        let path = settings.admin_key_file.as_deref();
        if let (Some(path), None, None) = (path, &settings.admin_listen, &settings.zmq_listen) {
            self.add(format!(
                "--admin-key-file {}: has no use without --admin-listen",
                path.display()
            ));
        }
        if let (Some(_), Some(listen), false) = (path, &settings.zmq_listen, unsigned) {
            self.add(format!(
                "--zmq-listen {listen}: what registers over ZeroMQ is not signed, and --admin-key-file \
                 asks for signatures; leave one of them out, or say --zmq-unsigned true where only \
                 the engines reach that port"
            ));
        }
        self.keys("--admin-key-file", path, ADMIN_KEY_BYTES_MIN)
    }

    /// Keys of clients.
    pub(super) fn api_keys(&mut self, settings: &Settings) -> Option<Keys> {
        let path = settings.api_key_file.as_deref();
        self.keys("--api-key-file", path, API_KEY_BYTES_MIN)
    }

    /// Where workers register over ZeroMQ.
    pub(super) fn zmq(&mut self, settings: &Settings, connector: &dyn Connector) -> Option<String> {
        let listen = settings.zmq_listen.as_ref()?;
        if let Err(fault) = host_port(listen) {
            self.add(format!("--zmq-listen {listen}: {fault}"));
        }
        if connector.moriio_mode().is_none() {
            self.add(format!(
                "--zmq-listen {listen}: only MoRI-IO's workers register over ZeroMQ, and --connector \
                 is {}; take moriio-read or moriio-write, or --admin-listen for others",
                connector.name()
            ));
        }
        Some(listen.clone())
    }
}
