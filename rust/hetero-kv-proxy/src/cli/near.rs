//! What a misspelt name was meant to be.

/// Longer words are not compared: no name of ours comes near it.
const WORD_BYTES_MAX: usize = 64;

/// The nearest of `known`, where it is near enough to be meant: one slip in four letters, and one in
/// short words. Case does not count, nor whether `-` or `_` stands between words.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |word: &str| word.to_ascii_lowercase().replace('-', "_").into_bytes();
    if word.len() > WORD_BYTES_MAX {
        return None;
    }
    let word = plain(word);
    let slips_max = (word.len() / 4).max(1);
    let each = known
        .into_iter()
        .map(|name| (slips(&word, &plain(name)), name));
    let nearest = each.min_by_key(|(slips, _)| *slips);
    nearest
        .filter(|(slips, _)| *slips <= slips_max)
        .map(|(_, name)| name)
}

/// Letters that are left out, put in, exchanged for another, or swapped with the next one.
fn slips(one: &[u8], other: &[u8]) -> usize {
    let mut before = vec![0; other.len() + 1];
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut row = vec![i + 1; other.len() + 1];
        for (j, b) in other.iter().enumerate() {
            let exchanged = last[j] + usize::from(a != b);
            row[j + 1] = exchanged.min(last[j + 1] + 1).min(row[j] + 1);
            let swapped = i > 0 && j > 0 && *a == other[j - 1] && one[i - 1] == *b;
            if swapped {
                row[j + 1] = row[j + 1].min(before[j - 1] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[other.len()]
}

#[cfg(test)]
mod tests;
