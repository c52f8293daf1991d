//! The holding process.

use std::error::Error;
use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use hetero_kv_core::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank};
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::plan::Owner;
use hetero_kv_core::wire::card::Endpoints;
use hetero_kv_transport::lease_page::LeasePage;
use hetero_kv_transport::process;
use hetero_kv_transport::tcp::{DataServer, HolderPlace, ServerOptions};
use serde::{Deserialize, Serialize};

use super::bare;
use super::memory::{Pool, pattern};

/// What the reading process has to know.
#[derive(Serialize, Deserialize)]
pub(crate) struct Card {
    pub(crate) pid: u32,
    pub(crate) endpoints: Endpoints,
    pub(crate) region: MemoryRegion,
    /// Where the bare socket listens.
    pub(crate) bare_port: u16,
}

pub(crate) fn owner() -> Owner {
    Owner {
        engine: EngineId::new("bench").expect("a valid id"),
        incarnation: Incarnation(1),
        dp_rank: DpRank(0),
    }
}

pub(crate) fn run(mib: usize) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(mib << 20)?;
    pool.fill(pattern);
    let page = Arc::new(LeasePage::new(16)?);
    let readable = process::of_this_process(Arc::clone(&page), true)?;
    let server = DataServer::start(pool.register(), page, ServerOptions::default())?;
    server.serve_as(HolderPlace {
        owner: owner(),
        tp_rank: TpRank(0),
        pp_rank: PpRank(0),
    });
    let bare_listener = TcpListener::bind("127.0.0.1:0")?;
    let card = Card {
        pid: std::process::id(),
        endpoints: Endpoints {
            process: Some(readable.endpoint().clone()),
            tcp: Some(server.endpoint().clone()),
            ..Endpoints::default()
        },
        region: pool.region(),
        bare_port: bare_listener.local_addr()?.port(),
    };
    let region = pool.region();
    thread::spawn(move || bare::serve(&bare_listener, region));
    println!("{}", serde_json::to_string(&card)?);
    std::io::stdout().flush()?;
    // Until the caller closes it.
    for line in std::io::stdin().lines() {
        line?;
    }
    Ok(())
}
