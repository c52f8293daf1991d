//! Finds libibverbs at run time: nothing links it, and a host without it loses only this transport.
//!
//! It is never shipped with a wheel. It loads the drivers of the host's NICs, and those have to be
//! of its own version.
#![allow(unsafe_code)]

use std::env;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use super::error::VerbsError;
use super::sys::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid,
    ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

/// Names that rdma-core's packages give the library, the one without a development package first.
const NAMES: [&str; 2] = ["libibverbs.so.1", "libibverbs.so"];

/// Environment variable that names the library's file.
const OVERRIDE: &str = "HETERO_KV_LIBIBVERBS";

macro_rules! library {
    ($($(#[$doc:meta])* $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions that this crate calls. The header's other calls are inline there and go
        /// through [`super::sys::ibv_context_ops`].
        pub(super) struct Library {
            $($(#[$doc])* pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            fn find(handle: *mut c_void) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let symbol = symbol(handle, name)?;
                        // SAFETY: the symbol is the library's function of this name, and the type
                        // is the one its header declares it with; the library is never unloaded.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> $result,
                            >(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

library! {
    /// NULL with errno on failure; the count goes to the pointer.
    ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list(*mut *mut ibv_device) -> ();
    ibv_get_device_name(*mut ibv_device) -> *const c_char;
    ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device(*mut ibv_context) -> c_int;
    ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    /// Fills the first part of the structure only; the rest has to be zeroed before.
    ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    ibv_query_gid(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq(*mut ibv_cq) -> c_int;
    ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events(*mut ibv_cq, u32) -> ();
    ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp(*mut ibv_qp) -> c_int;
    ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ibv_ack_async_event(*mut ibv_async_event) -> ();
    ibv_fork_init() -> c_int;
}

/// The library, loaded by the first call in this process.
pub(super) fn load() -> Result<&'static Library, VerbsError> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    LOADED
        .get_or_init(open)
        .as_ref()
        .map_err(|reason| VerbsError::NoLibrary(reason.clone()))
}

fn open() -> Result<Library, String> {
    // Whatever is set decides, also what is no text: the system's own library must not stand in
    // for a file that was meant.
    if let Some(named) = env::var_os(OVERRIDE).filter(|named| !named.is_empty()) {
        return open_named(&named).map_err(|reason| format!("{OVERRIDE} names it: {reason}"));
    }
    let mut reasons = Vec::new();
    for name in NAMES {
        match open_one(OsStr::new(name)) {
            Ok(library) => return Ok(library),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join(", "))
}

fn open_named(named: &OsStr) -> Result<Library, String> {
    // The loader opens a pipe to read it, and waits for a writer without end. A name without a
    // folder is looked for along its own path.
    let path = Path::new(named);
    if path.components().count() > 1 && fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(format!("{}: not a file", path.display()));
    }
    open_one(named)
}

fn open_one(name: &OsStr) -> Result<Library, String> {
    let file =
        CString::new(name.as_bytes()).map_err(|_| "its name holds a zero byte".to_owned())?;
    // SAFETY: the name is a C string for the length of the call. Loading runs the library's own
    // start-up code, which the operator's system or setting vouches for.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(last_error());
    }
    let library = Library::find(handle)?;
    // Registered memory is pinned; a child forked by the engine must not take its pages away. On
    // kernels since 5.12 this does nothing.
    // SAFETY: no verbs call of this process came before it, and it takes no argument.
    let status = unsafe { (library.ibv_fork_init)() };
    if status != 0 {
        tracing::debug!(
            status,
            "ibv_fork_init: a forked child may take pinned pages"
        );
    }
    Ok(library)
}

fn symbol(handle: *mut c_void, name: &str) -> Result<*mut c_void, String> {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: the handle is one that dlopen gave and nobody closes, the name a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        return Err(last_error());
    }
    Ok(found)
}

/// What the loader says of its last failure.
fn last_error() -> String {
    // SAFETY: dlerror gives NULL or a C string that stands until this thread's next loader call.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "the loader gives no reason".into()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}
