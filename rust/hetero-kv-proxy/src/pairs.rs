//! What a client is told where no workers go together for its request.

use crate::openai::error::ApiError;
use crate::routing::Unlike;

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
    let Unlike {
        field,
        prefill,
        decode,
    } = unlike;
    let key = field.key();
    let message = format!(
        "no prefill worker goes with a decode worker: `{key}` is `{prefill}` on prefill and `{decode}` \
         on decode; register workers that agree in it"
    );
    ApiError {
        param: Some(key.to_owned()),
        ..ApiError::new(503, "no_pair", message)
    }
}
