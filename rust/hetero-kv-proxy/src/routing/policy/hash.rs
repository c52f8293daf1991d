//! The hash of routing keys: the same in every run and every proxy, so that proxies beside each
//! other send one key to one slot.
//!
//! No guard against made collisions is needed: two keys of one hash share a slot, within the
//! bounds of its load, and nothing else.

const LANES: usize = 4;
const WORD_BYTES: usize = 8;
/// Bytes that one round takes in.
const ROUND_BYTES: usize = LANES * WORD_BYTES;
/// Odd numbers with about as many ones as zeros.
const LANE_KEYS: [u64; LANES] = [
    0x9e37_79b9_7f4a_7c15,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0xd6e8_feb8_6659_fd93,
];

/// Both halves of the product: each bit of the result depends on all of `a` and `b`.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

/// A hash that can be read at any round while more is added. Four independent lanes: the processor
/// works on all of them at once.
#[derive(Debug, Clone)]
pub(super) struct Hasher {
    lanes: [u64; LANES],
    bytes: u64,
}

impl Hasher {
    /// A hash of nothing; other seeds give other hashes.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            lanes: LANE_KEYS.map(|key| seed ^ key),
            bytes: 0,
        }
    }

    /// Adds bytes. Only the last call of all may bring other than whole rounds: a part of one is
    /// filled up with zeros.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.bytes = self.bytes.wrapping_add(bytes.len() as u64);
        let (rounds, rest) = bytes.as_chunks::<ROUND_BYTES>();
        // By value: the lanes stay in registers.
        let mut lanes = self.lanes;
        for round in rounds {
            lanes = next(lanes, round);
        }
        if !rest.is_empty() {
            let mut last = [0; ROUND_BYTES];
            last[..rest.len()].copy_from_slice(rest);
            lanes = next(lanes, &last);
        }
        self.lanes = lanes;
    }

    /// The hash of all that was added.
    pub(super) fn digest(&self) -> u64 {
        self.lanes
            .iter()
            .zip(LANE_KEYS)
            .fold(self.bytes ^ LANE_KEYS[0], |all, (lane, key)| {
                mix(all ^ lane, key).wrapping_add(*lane)
            })
    }
}

/// The lanes after one more round.
fn next(mut lanes: [u64; LANES], round: &[u8; ROUND_BYTES]) -> [u64; LANES] {
    let (words, _) = round.as_chunks::<WORD_BYTES>();
    for ((lane, key), word) in lanes.iter_mut().zip(LANE_KEYS).zip(words) {
        *lane = mix(*lane ^ u64::from_le_bytes(*word), key).wrapping_add(key);
    }
    lanes
}

/// The hash of `bytes`.
pub(super) fn hash(seed: u64, bytes: &[u8]) -> u64 {
    let mut hasher = Hasher::new(seed);
    hasher.update(bytes);
    hasher.digest()
}
