use std::fs::{Permissions, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;

/// A file that is gone with the value.
struct KeyFile(PathBuf);

impl KeyFile {
    fn new(name: &str, text: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("hkv-keys-{}-{name}", std::process::id()));
        write(&path, text).expect("a temporary file");
        Self(path)
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_file_gives_its_keys() {
    let file = KeyFile::new(
        "good",
        b"# ours\nkey-of-the-cluster-a\nkey-of-the-cluster-b\n",
    );
    let keys = read(&file.0).expect("keys");
    assert_eq!(keys.first(), b"key-of-the-cluster-a");
    assert_eq!(format!("{keys:?}"), "Keys(2)");
}

#[test]
fn a_file_that_gives_none_is_named_and_its_text_is_not() {
    let text = vec![b'k'; 1 << 20];
    let cases: [(&str, &[u8], &str); 4] = [
        ("empty", b"", "no key in it; one a line"),
        (
            "short",
            b"secret",
            "line 1: a key has 16 to 512 characters, not 6",
        ),
        (
            "blank",
            b"secret secret secret",
            "line 1: a key is visible ASCII",
        ),
        ("large", &text, "1048576 bytes; at most 262144"),
    ];
    for (name, text, fault) in cases {
        let file = KeyFile::new(name, text);
        let told = read(&file.0).expect_err("a fault");
        assert!(told.starts_with(&file.0.display().to_string()), "{told}");
        assert!(told.contains(fault), "{told}");
        assert!(!told.contains("secret"), "{told}");
    }
    let missing = read(Path::new("/nowhere/key")).expect_err("a fault");
    assert!(
        missing.starts_with("/nowhere/key: No such file"),
        "{missing}"
    );
    // Neither a folder nor a pipe that nobody writes to is waited for.
    let folder = read(&std::env::temp_dir()).expect_err("a fault");
    assert!(folder.ends_with("not a file"), "{folder}");
    let device = read(Path::new("/dev/zero")).expect_err("a fault");
    assert!(device.ends_with("not a file"), "{device}");
}

#[test]
fn keys_that_every_user_may_read_are_told_of() {
    let file = KeyFile::new("exposed", b"key-of-the-cluster-a\n");
    for (mode, exposed) in [(0o600, false), (0o640, false), (0o644, true), (0o602, true)] {
        set_permissions(&file.0, Permissions::from_mode(mode)).expect("ours");
        let metadata = std::fs::metadata(&file.0).expect("there");
        let told = exposure(&metadata);
        assert_eq!(told.is_some(), exposed, "{mode:o}: {told:?}");
        assert!(read(&file.0).is_ok());
    }
}

#[test]
fn no_two_nonces_are_alike() {
    let drawn: Vec<Nonce> = (0..100).map(|_| nonce().expect("random")).collect();
    for (index, one) in drawn.iter().enumerate() {
        assert!(!drawn[..index].contains(one));
    }
}
