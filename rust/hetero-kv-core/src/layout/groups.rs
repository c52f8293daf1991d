//! The kinds of KV cache groups.

use super::GROUPS_MAX;

/// One KV cache group of an engine, in the order of its lists of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroup<'a> {
    /// What to call it in messages: the first of its layers.
    pub name: &'a str,
    /// How its layers attend, such as `full_attention` or `sliding_window`.
    pub kind: &'a str,
}

/// Kinds whose blocks hold every token of the sequence, by absolute index.
const KINDS: [&str; 2] = ["full_attention", "mla_attention"];

/// Characters of a name or kind that a message shows.
const SHOWN_CHARS_MAX: usize = 200;

/// Groups that cannot be moved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// A group's kind is not supported.
    #[error(
        "group_kinds: group {group} ({name:?}) is {kind:?}; only full_attention and mla_attention can be moved"
    )]
    Kind {
        /// Its position.
        group: usize,
        /// Its name.
        name: String,
        /// Its kind.
        kind: String,
    },
    /// No group, or more than [`GROUPS_MAX`].
    #[error("group_kinds: {0} groups, not in 1..=64")]
    Count(usize),
}

/// The value of the compatibility field [`super::field::GROUP_KINDS`]: the kinds in order, joined
/// by commas.
///
/// # Errors
/// [`GroupError`] names the group whose kind cannot be moved: one that keeps a window or a state
/// instead of every token would be read as bytes of other tokens.
pub fn group_kinds(groups: &[KvGroup<'_>]) -> Result<String, GroupError> {
    if groups.is_empty() || groups.len() > GROUPS_MAX as usize {
        return Err(GroupError::Count(groups.len()));
    }
    let mut kinds = Vec::with_capacity(groups.len());
    for (group, found) in groups.iter().enumerate() {
        if !KINDS.contains(&found.kind) {
            let shown = |text: &str| text.chars().take(SHOWN_CHARS_MAX).collect();
            return Err(GroupError::Kind {
                group,
                name: shown(found.name),
                kind: shown(found.kind),
            });
        }
        kinds.push(found.kind);
    }
    Ok(kinds.join(","))
}
