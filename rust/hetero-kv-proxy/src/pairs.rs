//! The prefill worker that a client names, and what it is told where no workers go together for its
//! request.

use crate::app::App;
use crate::config::base_url;
use crate::openai::error::ApiError;
use crate::routing::{InstanceIndex, Role, Unlike};

impl App {
    /// The prefill worker at this URL.
    ///
    /// # Errors
    /// 400 where clients may not choose, 403 where it names none. Nothing is dialled: a URL out of a
    /// body is only ever compared with those that workers registered.
    pub(crate) fn prefill_endpoint(&self, url: &str) -> Result<InstanceIndex, ApiError> {
        let fault = |status, code, message| ApiError {
            param: Some("prefill_endpoint".to_owned()),
            ..ApiError::new(status, code, message)
        };
        if !self.config().allow_prefill_endpoint {
            return Err(fault(
                400,
                "prefill_endpoint_not_allowed",
                "`prefill_endpoint` is not allowed; the proxy takes it with --allow-prefill-endpoint",
            ));
        }
        let base = base_url(url).ok();
        let here = self.snapshot(Role::Prefill);
        let mut named = here.iter().filter(|known| {
            let same = base
                .as_ref()
                .is_some_and(|base| known.worker.base.is_same(base));
            same && known.leave().is_none()
        });
        named.next().map(|known| known.index).ok_or_else(|| {
            let message = "`prefill_endpoint` names no prefill worker of this proxy";
            fault(403, "prefill_endpoint_unknown", message)
        })
    }
}

/// As much of a client's words as is shown back.
const SHOWN_CHARS_MAX: usize = 128;

/// No worker serves the model.
pub(crate) fn no_model(model: &str) -> ApiError {
    let shown: String = model.chars().take(SHOWN_CHARS_MAX).collect();
    ApiError {
        param: Some("model".to_owned()),
        ..ApiError::new(
            404,
            "model_not_found",
            format!("The model `{shown}` does not exist."),
        )
    }
}

/// Prefill and decode workers are there, and no two of them go together.
pub(crate) fn no_pair(unlike: &Unlike) -> ApiError {
    let shown = |value: &str| -> String { value.chars().take(SHOWN_CHARS_MAX).collect() };
    let key = &*unlike.field;
    let (prefill, decode) = (shown(&unlike.prefill), shown(&unlike.decode));
    let message = format!(
        "no prefill worker goes with a decode worker: `{key}` is `{prefill}` on prefill and `{decode}` \
         on decode; register workers that agree in it"
    );
    ApiError {
        param: Some(key.to_owned()),
        ..ApiError::new(503, "no_pair", message)
    }
}

/// Revisions have weights, and none of those has workers.
pub(crate) fn no_revision() -> ApiError {
    ApiError::new(
        503,
        "no_revision",
        "no revision with a weight has workers for the request; GET /v1/revisions on the admin \
         listener shows the weights and who is there",
    )
}
