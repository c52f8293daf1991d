//! Request bodies.

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::json;

use super::cli::BenchArgs;

/// Hexadecimal digits at a prompt's begin that tell it from others.
const MARK: usize = 16;
/// Token ids that any vocabulary has and that are no special tokens in common ones.
const FIRST_ID: u64 = 256;
const IDS: u64 = 128;

/// Makes the body of each request.
#[derive(Debug)]
pub struct Bodies {
    head: Bytes,
    mark: Mark,
    tail: Bytes,
    seed: u64,
}

/// What differs between requests.
#[derive(Debug)]
enum Mark {
    Nothing,
    Digits(usize),
    Ids(usize),
}

impl Bodies {
    /// Bodies by the flags, for `model`.
    pub fn new(args: &BenchArgs, model: &str) -> Self {
        let mut head = format!("{{\"model\":{},", json!(model));
        let mut tail = String::new();
        let mut random = Random::new(args.seed);
        let mark = if let Some(count) = args.prompt_tokens {
            let count = count as usize;
            let marked = if args.same_prompt { 0 } else { count.min(MARK) };
            head.push_str("\"prompt\":[");
            let rest: Vec<String> = (marked..count).map(|_| random.id().to_string()).collect();
            if marked > 0 && !rest.is_empty() {
                tail.push(',');
            }
            tail.push_str(&rest.join(","));
            tail.push(']');
            Mark::Ids(marked)
        } else {
            let bytes = args.prompt_bytes as usize;
            let marked = if args.same_prompt { 0 } else { bytes.min(MARK) };
            head.push_str(if args.chat {
                "\"messages\":[{\"role\":\"user\",\"content\":\""
            } else {
                "\"prompt\":\""
            });
            // Words of seven letters and a blank.
            for at in marked..bytes {
                let letter = char::from(b'a' + (random.bits() % 26) as u8);
                tail.push(if at % 8 == 7 { ' ' } else { letter });
            }
            tail.push_str(if args.chat { "\"}]" } else { "\"" });
            Mark::Digits(marked)
        };
        tail.push_str(&format!(",\"max_tokens\":{}", args.max_tokens));
        if !args.respect_eos {
            tail.push_str(",\"ignore_eos\":true");
        }
        if !args.no_stream {
            tail.push_str(",\"stream\":true");
            if !args.no_usage {
                tail.push_str(",\"stream_options\":{\"include_usage\":true}");
            }
        }
        tail.push('}');
        Self {
            head: head.into(),
            mark,
            tail: tail.into(),
            seed: args.seed,
        }
    }

    /// The same bytes each time.
    pub fn fixed(bytes: Bytes) -> Self {
        Self {
            head: bytes,
            mark: Mark::Nothing,
            tail: Bytes::new(),
            seed: 0,
        }
    }

    /// The body of request `index`; requests of one run differ by it.
    pub fn make(&self, index: u64) -> Bytes {
        let mut random = Random::new(self.seed ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut body = BytesMut::with_capacity(self.head.len() + 5 * MARK + self.tail.len());
        body.put_slice(&self.head);
        match self.mark {
            Mark::Nothing => return self.head.clone(),
            Mark::Digits(count) => {
                let digits = format!("{:016x}", random.bits());
                body.put_slice(&digits.as_bytes()[..count]);
            }
            Mark::Ids(count) => {
                for at in 0..count {
                    let comma = if at > 0 { "," } else { "" };
                    body.put_slice(format!("{comma}{}", random.id()).as_bytes());
                }
            }
        }
        body.put_slice(&self.tail);
        body.freeze()
    }
}

/// SplitMix64: enough for prompts and arrivals, and the same everywhere.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// By a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Above 0, at most 1.
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    fn id(&mut self) -> u64 {
        FIRST_ID + self.bits() % IDS
    }
}

#[cfg(test)]
mod tests;
