//! The least that two legs cost: a forwarder that does nothing but pass messages on.
//!
//! `floor --listen HOST:PORT --leg HOST:PORT[,HOST:PORT...] --leg ...`. One thread. Each client's
//! connection has one to a worker of each `--leg`, round robin, made with it and kept as long. A
//! request is read whole, by its `Content-Length`, and written unchanged to the first leg's worker;
//! its answer is read whole and dropped, the request is written to the next, and the answer of the
//! last leg is passed back. A head is searched for its end and for one header, and nothing else is
//! looked at: no JSON, no checks, no deadlines, no retries, no metrics. What is left is what the
//! kernel takes for the messages, and what tokio takes to learn that one has come.
//!
//! It is no proxy: a chunked message, or one that it cannot follow, ends the client's connection.

use std::future::Future;
use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Room that a connection has for a message before it grows.
const MESSAGE_BYTES: usize = 64 << 10;

/// What the command line says.
struct Told {
    listen: SocketAddr,
    /// The workers of each leg.
    legs: Vec<Vec<SocketAddr>>,
}

fn told() -> Result<Told, String> {
    let usage = "usage: floor --listen HOST:PORT --leg HOST:PORT[,HOST:PORT...] [--leg ...]";
    let address = |text: &str| {
        let bad = |error| format!("`{text}` is no address with a port: {error}");
        text.parse::<SocketAddr>().map_err(bad)
    };
    let (mut listen, mut legs) = (None, Vec::new());
    // `cargo bench` adds a flag of its own.
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(flag) = words.next() {
        let value = words.next().ok_or(usage)?;
        match flag.as_str() {
            "--listen" => listen = Some(address(&value)?),
            "--leg" => legs.push(value.split(',').map(address).collect::<Result<_, _>>()?),
            _ => return Err(usage.to_owned()),
        }
    }
    match listen {
        Some(listen) if !legs.is_empty() => Ok(Told { listen, legs }),
        Some(_) | None => Err(usage.to_owned()),
    }
}

fn main() -> Result<(), String> {
    let told = told()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(|error| error.to_string())?;
    let served = runtime.block_on(run(told));
    served.map_err(|error| error.to_string())
}

async fn run(told: Told) -> io::Result<()> {
    let listener = TcpListener::bind(told.listen).await?;
    for number in 0.. {
        let (client, _) = listener.accept().await?;
        let workers: Vec<SocketAddr> = told
            .legs
            .iter()
            .map(|workers| workers[number % workers.len()])
            .collect();
        tokio::spawn(ending(serve(client, workers)));
    }
    Ok(())
}

/// A connection that ends is the client's matter, or the worker's: the bench counts what fails.
async fn ending(served: impl Future<Output = io::Result<()>>) {
    let _ended = served.await;
}

async fn serve(mut client: TcpStream, workers: Vec<SocketAddr>) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut legs = Vec::with_capacity(workers.len());
    for worker in workers {
        let leg = TcpStream::connect(worker).await?;
        leg.set_nodelay(true)?;
        legs.push(leg);
    }
    let mut request = Vec::with_capacity(MESSAGE_BYTES);
    let mut answer = Vec::with_capacity(MESSAGE_BYTES);
    loop {
        read_message(&mut client, &mut request).await?;
        for leg in &mut legs {
            leg.write_all(&request).await?;
            read_message(leg, &mut answer).await?;
        }
        client.write_all(&answer).await?;
    }
}

/// Reads one message in place of what `message` held.
async fn read_message(stream: &mut TcpStream, message: &mut Vec<u8>) -> io::Result<()> {
    message.clear();
    let mut whole = None;
    loop {
        if stream.read_buf(message).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if whole.is_none() {
            whole = message_bytes(message)?;
        }
        match whole {
            Some(whole) if message.len() == whole => return Ok(()),
            Some(whole) if message.len() > whole => return Err(io::ErrorKind::InvalidData.into()),
            // A long message is read in as few pieces as it comes.
            Some(whole) => message.reserve(whole - message.len()),
            None => {}
        }
    }
}

/// Bytes of the message that begins `text`, head and body; `None` while its head is not whole.
fn message_bytes(text: &[u8]) -> io::Result<Option<usize>> {
    let mut at = 0;
    let mut body = 0;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        at += line.len();
        match line {
            b"\r\n" => return Ok(Some(at + body)),
            [.., b'\n'] => {}
            _ => return Ok(None),
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let (name, value) = line.split_at(colon);
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if name.eq_ignore_ascii_case(b"content-length") {
            let length = std::str::from_utf8(value[1..].trim_ascii()).ok();
            let length = length.and_then(|length| length.parse().ok());
            body = length.ok_or(io::ErrorKind::InvalidData)?;
        }
    }
    Ok(None)
}
