//! `hetero-kv doctor` names each planted fault, by the executable as a user runs it.
//!
//! | fault | planted by |
//! |---|---|
//! | port taken | a listener of this process |
//! | packets dropped | a router of network namespaces that drops them |
//! | wrong version | a scripted peer |
//! | memory lock limit | `ulimit -l`, without CAP_IPC_LOCK |
//! | no ptrace | a seccomp filter that refuses `process_vm_readv` |
//! | all interfaces | `--host 0.0.0.0`, `--listen 0.0.0.0` |
//! | unreachable advertised address | a closed port; the router that drops its packets |
//! | MTU black hole | the router, with a small MTU and no ICMP |
//! | vLLM that does not load the connector | a real vLLM without this package |
//! | missing device | `--rdma require` on a machine without one |
//! | RDMA of every other kind | a stand-in for libibverbs (`tests/doubles/verbs`) |
//!
//! What needs root, a tool or vLLM is skipped, with the reason on standard error.

mod between;
mod host;
mod links;
mod rdma;
mod report;
mod vllm;
