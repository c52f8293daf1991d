//! A fast look over JSON: where the top-level members of an object lie.
//!
//! Accepts nothing that a parser refuses, and is never the one to refuse: what it does not
//! understand is given to the parser, whose error the client gets. The text is known to be UTF-8.

use super::splice::Member;

/// Deeper nesting is left to the parser.
const DEPTH_MAX: usize = 128;
/// Bytes of a string that are looked at together: of a long one, and of what is left of it.
const LONG_LANES: usize = 64;
const LANES: usize = 16;
/// Bytes of a word, and how many words of a string are looked at before it counts as long.
const WORD: usize = 8;
const SHORT_WORDS: usize = 4;

/// The offset behind the opening brace and the members, or `None` where a parser has to judge.
pub(super) fn members(text: &[u8]) -> Option<(usize, Vec<Member>)> {
    let mut scan = Scan { text, at: 0 };
    scan.space();
    scan.take(b'{')?;
    let open = scan.at;
    let mut members = Vec::with_capacity(8);
    scan.space();
    if scan.peek()? == b'}' {
        scan.at += 1;
    } else {
        loop {
            let start = scan.at;
            let escaped = scan.string()?;
            let name = start..scan.at;
            scan.space();
            scan.take(b':')?;
            scan.space();
            let start = scan.at;
            scan.value()?;
            members.push(Member {
                name,
                escaped,
                value: start..scan.at,
            });
            scan.space();
            match scan.next()? {
                b',' => scan.space(),
                b'}' => break,
                _ => return None,
            }
        }
    }
    scan.space();
    (scan.at == text.len()).then_some((open, members))
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    /// Passes a string, quotes included; whether it has an escape.
    fn string(&mut self) -> Option<bool> {
        self.take(b'"')?;
        let mut escaped = false;
        loop {
            self.plain();
            match self.next()? {
                b'"' => return Some(escaped),
                b'\\' => {
                    escaped = true;
                    match self.next()? {
                        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => {}
                        b'u' => {
                            let digits = self.text.get(self.at..self.at + 4)?;
                            if !digits.iter().all(u8::is_ascii_hexdigit) {
                                return None;
                            }
                            self.at += 4;
                        }
                        _ => return None,
                    }
                }
                // A control character has to be escaped.
                _ => return None,
            }
        }
    }

    /// Passes bytes that stand for themselves.
    fn plain(&mut self) {
        // Most strings are names, ids and tokens, and end within a few words.
        let (words, _) = self.text[self.at..].as_chunks::<WORD>();
        for word in words.iter().take(SHORT_WORDS) {
            if let Some(special) = first_special(*word) {
                self.at += special;
                return;
            }
            self.at += WORD;
        }
        self.at += plain_lanes::<LONG_LANES>(&self.text[self.at..]);
        self.at += plain_lanes::<LANES>(&self.text[self.at..]);
        let tail = &self.text[self.at..];
        let plain = tail.iter().position(|byte| is_special(*byte) != 0);
        self.at += plain.unwrap_or(tail.len());
    }

    /// Passes one value of any kind.
    fn value(&mut self) -> Option<()> {
        // One bit for each open bracket: whether it is an object's.
        let mut objects = 0_u128;
        let mut depth = 0;
        loop {
            // At the begin of a value.
            match self.peek()? {
                b'"' => {
                    self.string()?;
                }
                b'{' | b'[' if depth == DEPTH_MAX => return None,
                b'[' if self.integers() => {}
                open @ (b'{' | b'[') => {
                    self.at += 1;
                    self.space();
                    let is_object = open == b'{';
                    if self.peek()? == if is_object { b'}' } else { b']' } {
                        self.at += 1;
                    } else {
                        objects = objects << 1 | u128::from(is_object);
                        depth += 1;
                        if is_object {
                            self.name()?;
                        }
                        continue;
                    }
                }
                b't' => self.word(b"true")?,
                b'f' => self.word(b"false")?,
                b'n' => self.word(b"null")?,
                _ => self.number()?,
            }
            // Behind a value.
            loop {
                if depth == 0 {
                    return Some(());
                }
                let in_object = objects & 1 == 1;
                self.space();
                match (self.next()?, in_object) {
                    (b',', _) => {
                        self.space();
                        if in_object {
                            self.name()?;
                        }
                        break;
                    }
                    (b'}', true) | (b']', false) => {
                        objects >>= 1;
                        depth -= 1;
                    }
                    _ => return None,
                }
            }
        }
    }

    /// Passes a list of integers without spaces, which is how block ids and tokens come; at any other
    /// value it stays where it is, and says so.
    fn integers(&mut self) -> bool {
        let list = &self.text[self.at..];
        let end = integers_end(list);
        self.at += end.unwrap_or(0);
        end.is_some()
    }

    /// Passes the name of a member and what stands between it and its value.
    fn name(&mut self) -> Option<()> {
        self.string()?;
        self.space();
        self.take(b':')?;
        self.space();
        Some(())
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        self.at += word.len();
        (self.text.get(self.at - word.len()..self.at)? == word).then_some(())
    }

    fn number(&mut self) -> Option<()> {
        if self.peek()? == b'-' {
            self.at += 1;
        }
        match self.next()? {
            b'0' => {}
            b'1'..=b'9' => self.digits(),
            _ => return None,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.some_digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.some_digits()?;
        }
        Some(())
    }

    fn digits(&mut self) {
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
    }

    fn some_digits(&mut self) -> Option<()> {
        let from = self.at;
        self.digits();
        (self.at > from).then_some(())
    }
}

/// Not 0 for a byte that ends a string, begins an escape, or has to be escaped.
fn is_special(byte: u8) -> u8 {
    u8::from((byte < b' ') | (byte == b'"') | (byte == b'\\'))
}

/// Which byte of a word is the first that is special.
fn first_special(word: [u8; WORD]) -> Option<usize> {
    const ONES: u64 = u64::from_le_bytes([1; WORD]);
    const TOPS: u64 = ONES << 7;
    let word = u64::from_le_bytes(word);
    // The top bit of each byte that is less than `low`; of those behind the first, maybe of others too.
    let below = |word: u64, low: u64| word.wrapping_sub(ONES * low) & !word & TOPS;
    let is = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    let special = below(word, b' '.into()) | is(b'"') | is(b'\\');
    (special != 0).then(|| (special.trailing_zeros() / u8::BITS) as usize)
}

/// The length of the first whole lanes in which no byte is special.
// Inlined where it is called, it is no longer compiled to many bytes at once.
#[inline(never)]
fn plain_lanes<const BYTES: usize>(text: &[u8]) -> usize {
    // Without a branch for each byte, so that a processor takes many at once.
    let is_plain = |lane: &[u8; BYTES]| {
        let any = lane.iter().fold(0, |any, byte| any | is_special(*byte));
        any == 0
    };
    let (lanes, _) = text.as_chunks::<BYTES>();
    BYTES * lanes.iter().take_while(|lane| is_plain(lane)).count()
}

/// Not 0 for a byte that cannot stand in a list of integers without spaces behind these two, of which
/// the first digit of the list may be the last.
fn is_foreign([before, last, byte]: [u8; 3]) -> u8 {
    let is_digit = |byte: u8| byte.wrapping_sub(b'0') < 10;
    let other = !(is_digit(byte) | (byte == b','));
    let no_number = (byte == b',') & !is_digit(last);
    let leading_zero = is_digit(byte) & (last == b'0') & !is_digit(before);
    u8::from(other | no_number | leading_zero)
}

/// Where a list of integers without spaces ends that begins with this bracket; `None` where there is
/// no such list.
#[inline(never)]
fn integers_end(list: &[u8]) -> Option<usize> {
    if !list.get(1)?.is_ascii_digit() {
        return None;
    }
    // Three looks at the same text, so that each byte is judged without a branch and with nothing
    // carried from the one before.
    let (before, _) = list.as_chunks::<LANES>();
    let (last, _) = list[1..].as_chunks::<LANES>();
    let (lanes, _) = list[2..].as_chunks::<LANES>();
    let is_listed = |((lane, last), before): &((&[u8; LANES], &[u8; LANES]), &[u8; LANES])| {
        (0..LANES).fold(0, |any, at| {
            any | is_foreign([before[at], last[at], lane[at]])
        }) == 0
    };
    let lanes = lanes.iter().zip(last).zip(before);
    let mut end = 2 + LANES * lanes.take_while(is_listed).count();
    while let Some(&[before, last, byte]) = list.get(end - 2..=end)
        && is_foreign([before, last, byte]) == 0
    {
        end += 1;
    }
    let closes = list.get(end) == Some(&b']') && list[end - 1].is_ascii_digit();
    closes.then_some(end + 1)
}

#[cfg(test)]
mod tests;
