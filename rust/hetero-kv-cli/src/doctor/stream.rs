//! Lines and streams of bytes over a socket, each with a deadline and a size limit.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest line; ours stay below a tenth of it but for errors.
const LINE_BYTES_MAX: usize = 4096;

/// Bytes of one chunk of a stream.
const CHUNK_BYTES: usize = 256 << 10;

/// Bytes in front of each chunk: its length, little endian; 0 ends the stream.
const HEAD_BYTES: usize = 4;

/// A moment by which something is done.
#[derive(Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    /// So much time from now.
    pub(super) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// Time left, never zero: sockets take zero for "no limit".
    fn left(self) -> io::Result<Duration> {
        let left = self.0.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(left)
    }
}

/// Whether an error is the end of a deadline.
pub(super) fn timed_out(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
    )
}

/// Processor time of this thread.
pub(super) fn cpu_time() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(spent.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(spent.tv_nsec).unwrap_or(0))
}

fn write(mut stream: &TcpStream, mut bytes: &[u8], deadline: Deadline) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(deadline.left()?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read(mut stream: &TcpStream, mut bytes: &mut [u8], deadline: Deadline) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_read_timeout(Some(deadline.left()?))?;
        match stream.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends a value as one line of JSON.
pub(super) fn send_line(
    stream: &TcpStream,
    value: &impl Serialize,
    deadline: Deadline,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    write(stream, &line, deadline)
}

/// Receives one line of JSON. What is no such line is [`io::ErrorKind::InvalidData`].
pub(super) fn receive_line<T: DeserializeOwned>(
    stream: &TcpStream,
    deadline: Deadline,
) -> io::Result<T> {
    let mut line = Vec::new();
    let mut byte = [0];
    // Byte by byte: what follows the line on the connection is not a line.
    loop {
        read(stream, &mut byte, deadline)?;
        if byte == *b"\n" {
            break;
        }
        line.push(byte[0]);
        if line.len() > LINE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    serde_json::from_slice(&line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// How much one side moved, and what it took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moved {
    pub(super) bytes: u64,
    pub(super) wall: Duration,
    pub(super) cpu: Duration,
}

impl Moved {
    /// Megabytes (10^6) a second.
    pub(super) fn megabytes_per_s(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.wall.as_secs_f64().max(1e-9)
    }
}

/// Sends a stream until `bytes_max` are sent or `time_max` is over.
pub(super) fn send_stream(
    stream: &TcpStream,
    bytes_max: u64,
    time_max: Duration,
    deadline: Deadline,
) -> io::Result<Moved> {
    // No run of equal bytes: something on the way might compress them.
    let chunk: Vec<u8> = (0..CHUNK_BYTES as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect();
    let (begun, cpu_begun) = (Instant::now(), cpu_time());
    let mut bytes = 0;
    while bytes < bytes_max && begun.elapsed() < time_max {
        let count = chunk
            .len()
            .min(usize::try_from(bytes_max - bytes).unwrap_or(usize::MAX));
        let head = u32::try_from(count).map_err(io::Error::other)?;
        write(stream, &head.to_le_bytes(), deadline)?;
        write(stream, &chunk[..count], deadline)?;
        bytes += u64::from(head);
    }
    write(stream, &[0; HEAD_BYTES], deadline)?;
    Ok(Moved {
        bytes,
        wall: begun.elapsed(),
        cpu: cpu_time().saturating_sub(cpu_begun),
    })
}

/// Receives a stream to its end.
pub(super) fn receive_stream(stream: &TcpStream, deadline: Deadline) -> io::Result<Moved> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let (begun, cpu_begun) = (Instant::now(), cpu_time());
    let mut bytes = 0;
    loop {
        let mut head = [0; HEAD_BYTES];
        read(stream, &mut head, deadline)?;
        let count = u32::from_le_bytes(head);
        if count == 0 {
            break;
        }
        let chunk = chunk
            .get_mut(..count as usize)
            .ok_or(io::ErrorKind::InvalidData)?;
        read(stream, chunk, deadline)?;
        bytes += u64::from(count);
    }
    Ok(Moved {
        bytes,
        wall: begun.elapsed(),
        cpu: cpu_time().saturating_sub(cpu_begun),
    })
}
