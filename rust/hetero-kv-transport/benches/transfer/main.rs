//! The two processes of `benches/transfer.py`: one that holds memory, and one that reads it by our
//! transports and by the bare calls that they are held against.
//!
//! `transfer hold --mib N` prints its card as one line of JSON and holds until its input ends.
//! `transfer read CARD` then takes one order per line and answers each with one line: which way,
//! which case, and whether every byte is to be compared. Interleaving is the caller's.

mod bare;
mod cases;
mod hold;
mod memory;
mod ours;
mod read;

use std::process::ExitCode;

const USAGE: &str = "transfer hold --mib N | transfer read CARD | transfer cases";

fn main() -> ExitCode {
    // `cargo bench` adds it.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["hold", "--mib", mib] => match mib.parse() {
            Ok(mib @ 1..=4096) => hold::run(mib),
            Ok(_) | Err(_) => Err(format!("--mib is {mib}, not a number of 1 to 4096").into()),
        },
        ["read", card] => read::run(card),
        ["cases"] => {
            cases::print();
            Ok(())
        }
        _ => Err(USAGE.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("transfer: {error}");
            ExitCode::FAILURE
        }
    }
}
