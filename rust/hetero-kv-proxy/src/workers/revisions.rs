//! The shares of revisions, shown and changed while the proxy runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::body::Members;
use crate::admin;
use crate::answer::Answer;
use crate::app::App;
use crate::metrics::RevisionLabels;
use crate::openai::error::ApiError;
use crate::routing::{Field, Role, Weights};

#[derive(Serialize)]
struct Shown {
    revisions: Vec<Revision>,
}

#[derive(Default, Serialize)]
struct Revision {
    revision: String,
    /// `null` where weights are given and it has none, and where none are.
    weight: Option<u32>,
    /// Workers that take legs.
    prefill: usize,
    decode: usize,
    requests: u64,
    moved: u64,
}

/// Every revision that has a weight or workers.
pub(super) fn shown(app: &App) -> Answer {
    let mut known: BTreeMap<String, Revision> = BTreeMap::new();
    let mut at = |revision: &str, change: &dyn Fn(&mut Revision)| {
        change(known.entry(revision.to_owned()).or_default());
    };
    if let Some(weights) = app.revisions.weights() {
        for (revision, weight) in weights.entries() {
            at(revision, &|known| known.weight = Some(*weight));
        }
    }
    for role in [Role::Prefill, Role::Decode] {
        let (instances, views) = app.snapshot_with_view(role);
        for (instance, view) in instances.iter().zip(views) {
            let taken = usize::from(view.routable);
            if let Some(revision) = instance.worker.traits.get(Field::Revision) {
                at(revision, &|known| match role {
                    Role::Prefill => known.prefill += taken,
                    Role::Decode => known.decode += taken,
                });
            }
        }
    }
    let revisions = known.into_iter().map(|(revision, mut known)| {
        let labels = RevisionLabels {
            revision: Arc::from(revision.as_str()),
        };
        let metrics = &app.metrics;
        known.revision = revision;
        // A look makes no series.
        known.requests = metrics
            .revision_requests
            .get(&labels)
            .map_or(0, |n| n.get());
        known.moved = metrics.revision_moves.get(&labels).map_or(0, |n| n.get());
        known
    });
    let revisions = revisions.collect();
    admin::json(StatusCode::OK, &Shown { revisions })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    weights: Members,
}

/// Takes the body of `PUT /v1/revisions`; no weights at all end the draw.
///
/// # Errors
/// Status 400 that names what is wrong; nothing is changed.
pub(super) fn set(app: &App, body: &[u8]) -> Result<(), ApiError> {
    let body: Body = serde_json::from_slice(body).map_err(|error| {
        let message = format!("the body must be {{\"weights\":{{\"REVISION\":WEIGHT}}}}: {error}");
        ApiError::new(400, "invalid_json", message)
    })?;
    let fault = |message: String| ApiError {
        param: Some("weights".to_owned()),
        ..ApiError::new(400, "invalid_field", message)
    };
    let weight = |(revision, weight): (String, serde_json::Value)| {
        let number = weight
            .as_u64()
            .and_then(|number| u32::try_from(number).ok());
        let number = number.ok_or_else(|| {
            let shown: String = revision.chars().take(64).collect();
            fault(format!(
                "`weights`: `{shown}` must be a whole number, not {weight}"
            ))
        })?;
        Ok::<_, ApiError>((revision, number))
    };
    let entries = body.weights.0.into_iter().map(weight);
    let weights = Weights::new(entries.collect::<Result<_, _>>()?)
        .map_err(|text| fault(format!("`weights`: {text}")))?;
    app.set_weights(weights);
    Ok(())
}
