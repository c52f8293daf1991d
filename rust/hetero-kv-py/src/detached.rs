//! Values whose end waits for threads.

use std::ops::{Deref, DerefMut};

use pyo3::Python;

/// Drops what it holds without the interpreter lock: Python drops its objects under the lock, and
/// a thread that is waited for may need it to come to its end.
pub(crate) struct Detached<T: Send>(Option<T>);

impl<T: Send> Detached<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    #[allow(clippy::expect_used)]
    fn deref(&self) -> &T {
        self.0.as_ref().expect("only its drop takes the value")
    }
}

impl<T: Send> DerefMut for Detached<T> {
    #[allow(clippy::expect_used)]
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("only its drop takes the value")
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let Some(value) = self.0.take() else {
            return;
        };
        let mut value = Some(value);
        Python::try_attach(|py| {
            let value = value.take();
            py.detach(move || drop(value));
        });
        // While the interpreter ends nobody attaches any more; nothing is left to deadlock with.
        drop(value);
    }
}
