//! Which process listens on a port, from `/proc` (proc(5)).

use std::fs;

/// State of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// Name and pid of a process that listens on the port, as far as this user may see it.
pub(super) fn of(port: u16) -> Option<String> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| listening_inodes(&table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    if inodes.is_empty() {
        return None;
    }
    fs::read_dir("/proc")
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .find(|pid| holds_one_of(*pid, &inodes))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{} (pid {pid})", name.trim())
        })
}

/// Inodes of the sockets that listen on the port: columns 2 (address:port in hex), 4 (state) and
/// 10 (inode).
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    let wanted = format!("{port:04X}");
    table
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split_ascii_whitespace().collect();
            let (_, at) = cells.get(1)?.rsplit_once(':')?;
            let found = at == wanted && cells.get(3) == Some(&LISTEN);
            found.then(|| cells.get(9).map(|inode| (*inode).to_owned()))?
        })
        .collect()
}

fn holds_one_of(pid: u32, inodes: &[String]) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        fs::read_link(descriptor.path()).is_ok_and(|link| {
            inodes
                .iter()
                .any(|inode| link.as_os_str() == inode.as_str())
        })
    })
}
