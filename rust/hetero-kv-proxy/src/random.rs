//! Random ids.

use std::cell::RefCell;

use crate::openai::error::ApiError;

/// Bytes of an id.
const ID_BYTES: usize = 16;
/// Ids that one call of the system gives.
const IDS: usize = 32;

/// Random bytes of the system that no id has used. They are wiped as they are used.
struct Fresh {
    bytes: [u8; IDS * ID_BYTES],
    used: usize,
}

thread_local! {
    static FRESH: RefCell<Fresh> = const {
        RefCell::new(Fresh {
            bytes: [0; IDS * ID_BYTES],
            used: IDS * ID_BYTES,
        })
    };
}

/// 128 random bits as 32 hex digits.
///
/// # Errors
/// 500 where the system gives no random numbers.
pub(crate) fn random_hex() -> Result<String, ApiError> {
    let id = FRESH.with_borrow_mut(|fresh| {
        if fresh.used == fresh.bytes.len() {
            getrandom::fill(&mut fresh.bytes).map_err(|_| {
                ApiError::new(500, "internal", "the system gives no random numbers")
            })?;
            fresh.used = 0;
        }
        let mut id = [0; ID_BYTES];
        let next = &mut fresh.bytes[fresh.used..fresh.used + ID_BYTES];
        id.copy_from_slice(next);
        next.fill(0);
        fresh.used += ID_BYTES;
        Ok::<_, ApiError>(id)
    })?;
    let mut digits = [0; 2 * ID_BYTES];
    for (pair, byte) in digits.as_chunks_mut().0.iter_mut().zip(id) {
        *pair = [byte >> 4, byte & 15].map(|half| b"0123456789abcdef"[usize::from(half)]);
    }
    // They are ASCII.
    Ok(String::from_utf8_lossy(&digits).into_owned())
}

#[cfg(test)]
mod tests;
