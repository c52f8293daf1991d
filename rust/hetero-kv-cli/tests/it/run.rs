//! Running `hetero-kv`.

use std::process::{Command, Output};

/// What one run left behind.
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `hetero-kv` with these words, split at blanks.
pub(crate) fn hetero_kv(words: &str) -> Run {
    Run::of(Command::new(env!("CARGO_BIN_EXE_hetero-kv")).args(words.split_whitespace()))
}

impl Run {
    /// Waits for the command's end.
    pub(crate) fn of(command: &mut Command) -> Self {
        let Output {
            status,
            stdout,
            stderr,
        } = command.output().expect("the command under test starts");
        Self {
            code: status.code().expect("no signal ends it"),
            stdout: String::from_utf8(stdout).expect("output is text"),
            stderr: String::from_utf8(stderr).expect("output is text"),
        }
    }
}

/// A filter that answers `process_vm_readv` with EPERM, as container runtimes' profiles do, and
/// lets everything else pass; then becomes what follows. BPF as in seccomp(2).
const FORBID_PROCESS_VM_READV: &str = r#"
import ctypes, os, platform, struct, sys
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
program = b"".join(struct.pack("HBBI", *step) for step in [
    (0x20, 0, 0, 0),              # load the call's number
    (0x15, 0, 1, number),         # equal? else skip one
    (0x06, 0, 0, 0x00050000 | 1), # answer EPERM
    (0x06, 0, 0, 0x7fff0000),     # allow
])
kept = ctypes.create_string_buffer(program, len(program))
filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(kept))
libc = ctypes.CDLL(None, use_errno=True)
for call in [(38, 1, 0, 0, 0), (22, 2, filter, 0, 0)]:
    if libc.prctl(*call):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// `hetero-kv` where it and its children may not read other processes' memory; words follow. Where
/// there are no filters, its standard error begins with `prctl: `.
pub(crate) fn without_process_memory() -> Command {
    let mut command = Command::new("python3");
    command.args([
        "-c",
        FORBID_PROCESS_VM_READV,
        env!("CARGO_BIN_EXE_hetero-kv"),
    ]);
    command
}
