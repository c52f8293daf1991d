//! A fast look over JSON: where the top-level members of an object lie.
//!
//! Accepts nothing that a parser refuses, and is never the one to refuse: what it does not
//! understand is given to the parser, whose error the client gets. The text is known to be UTF-8.

use super::splice::Member;

/// Deeper nesting is left to the parser.
const DEPTH_MAX: usize = 128;
/// Bytes of a string that are looked at together.
const LANES: usize = 32;

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
        let special = |byte: u8| (byte < b' ') | (byte == b'"') | (byte == b'\\');
        let rest = &self.text[self.at..];
        // Without a branch for each byte, so that a processor takes many at once.
        let (lanes, _) = rest.as_chunks::<LANES>();
        let whole = lanes
            .iter()
            .take_while(|lane| !lane.iter().fold(false, |any, byte| any | special(*byte)))
            .count();
        let tail = &rest[whole * LANES..];
        let plain = tail.iter().position(|byte| special(*byte));
        self.at += whole * LANES + plain.unwrap_or(tail.len());
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
