//! The legs of a request: choosing a leg's slot, sending it, and what follows when it fails.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};

use crate::admission::{Begun, Refused, Ticket};
use crate::answer;
use crate::app::App;
use crate::bootstrap;
use crate::connectors::{Connector, Leg, Slot};
use crate::headers;
use crate::instance::Instance;
use crate::lease::SlotLease;
use crate::openai::Route;
use crate::openai::request::Request;
use crate::revisions::Drawing;
use crate::routing::policy::RequestKey;
use crate::routing::{Alone, Bound, InstanceIndex, LegFault, Role, Traits};
use crate::slots::{Choice, Slots, Want};
use crate::timeline::Timeline;
use crate::trace_context::{self, TraceContext};
use crate::upstream::{self, LegBody, SendError, Written};

mod failure;
mod retry;
mod whole;

pub(crate) use failure::{Failure, deadline_exceeded, ended_twice, malformed, no_engine};
pub(crate) use retry::{Attempt, Refusal, after_failure, after_unreadable, tries_elsewhere};
pub(crate) use whole::{Unreadable, read_answer};

/// One request as both legs need it.
pub(crate) struct Call {
    pub(crate) app: Arc<App>,
    pub(crate) route: Route,
    pub(crate) connector: &'static dyn Connector,
    pub(crate) request: Request,
    /// The model that it names, where workers tell theirs.
    pub(crate) model: Option<String>,
    /// The prefill worker that the client names.
    pub(crate) endpoint: Option<InstanceIndex>,
    /// By what its revision is drawn, where revisions have weights.
    pub(crate) drawing: Option<Drawing>,
    pub(crate) headers: HeaderMap,
    pub(crate) key: RequestKey,
    pub(crate) written: Written,
    pub(crate) ticket: Ticket,
    /// When the request's head came, by the clock of routing.
    pub(crate) head_us: u64,
    /// Where its legs are noted.
    pub(crate) timeline: Arc<Timeline>,
    /// Whose trace it belongs to.
    pub(crate) trace: Option<TraceContext>,
}

impl Call {
    /// Takes the slots of the first legs, waiting for room.
    pub(crate) async fn slots(
        &self,
        prefill: Option<Choice<'_>>,
        decode: Option<Choice<'_>>,
    ) -> Result<Slots, Refused> {
        let slots = self.take(prefill, decode, None, Begun::No).await?;
        for lease in [&slots.prefill, &slots.decode].into_iter().flatten() {
            lease.note_queue(self.head_us);
        }
        Ok(slots)
    }

    /// Takes slots for another pair of legs.
    pub(crate) async fn pair_again(
        &self,
        avoid_prefill: &[InstanceIndex],
        avoid_decode: &[InstanceIndex],
    ) -> Result<Slots, Refused> {
        let prefill = Choice::Any {
            avoid: avoid_prefill,
        };
        let decode = Choice::Any {
            avoid: avoid_decode,
        };
        self.take(Some(prefill), Some(decode), None, Begun::Yes)
            .await
    }

    /// Takes a slot for another leg of a request that has begun; where the other leg has its worker,
    /// `peer`, one that goes with it.
    pub(crate) async fn slot(
        &self,
        role: Role,
        avoid: &[InstanceIndex],
        peer: Option<&Instance>,
    ) -> Result<Box<SlotLease>, Failure> {
        let choice = Some(Choice::Any { avoid });
        let taken = match role {
            Role::Prefill => self.take(choice, None, peer, Begun::Yes).await?.prefill,
            Role::Decode => self.take(None, choice, peer, Begun::Yes).await?.decode,
        };
        let twins = &self.app.twins;
        let is_peer = |taken: &SlotLease| {
            let (taken, Some(peer)) = (taken.instance().index, peer) else {
                return false;
            };
            match role {
                Role::Prefill => twins.are_one(taken, peer.index),
                Role::Decode => twins.are_one(peer.index, taken),
            }
        };
        // What is left is the other leg's engine, which hands nothing to itself.
        let taken = taken.filter(|taken| !is_peer(taken));
        taken.ok_or_else(|| no_engine(role).into())
    }

    async fn take(
        &self,
        prefill: Option<Choice<'_>>,
        decode: Option<Choice<'_>>,
        peer: Option<&Instance>,
        begun: Begun,
    ) -> Result<Slots, Refused> {
        let named = self.endpoint.map(Choice::At);
        let want = Want {
            prefill: prefill.map(|any| named.unwrap_or(any)),
            decode,
            partner: peer.map(|peer| peer.index),
            key: &self.key,
            bound: self.bound(peer.map(|peer| &peer.worker.traits)),
        };
        let app = &self.app;
        let mut slots = app.admission.slots(app, &want, &self.ticket, begun).await?;
        for lease in [&mut slots.prefill, &mut slots.decode]
            .into_iter()
            .flatten()
        {
            lease.follow(&self.timeline);
        }
        Ok(slots)
    }

    fn bound<'a>(&'a self, peer: Option<&'a Traits>) -> Bound<'a> {
        Bound {
            model: self.model.as_deref(),
            peer,
            draw: self.drawing.as_ref().map(Drawing::draw),
            only: None,
            barred: None,
        }
    }

    /// Why decode serves the request alone, where policy `auto` decides. Who names the prefill
    /// worker has decided.
    pub(crate) fn auto_alone(&self) -> Option<Alone> {
        let rules = self.app.config().auto.filter(|_| self.endpoint.is_none())?;
        let want = Want {
            prefill: None,
            decode: None,
            partner: None,
            key: &self.key,
            bound: self.bound(None),
        };
        let scene = self.app.scene(&want, self.request.prompt().len())?;
        rules.alone(&scene)
    }

    /// Instances that may serve a leg.
    fn instances(&self, role: Role) -> usize {
        match (role, self.endpoint) {
            (Role::Prefill, Some(_)) => 1,
            (Role::Prefill | Role::Decode, _) => self.app.routable(role).len(),
        }
    }

    /// The id by which an engine's answer is the client's.
    pub(crate) fn request_id(&self) -> Option<&HeaderValue> {
        self.headers.get(headers::REQUEST_ID)
    }

    /// An engine's answer, read whole, as the client gets it.
    pub(crate) fn passed_on(&self, head: http::response::Parts, body: Bytes) -> Failure {
        let headers = headers::for_client(head.headers, self.request_id());
        let answer = answer::passed_on(head.status, headers, body);
        Failure::Engine(Box::new(answer))
    }

    /// Sends a leg and waits for the response head.
    pub(crate) async fn send(
        &self,
        lease: &SlotLease,
        body: LegBody,
        leg: Option<&Leg>,
        fresh: bool,
    ) -> Result<Box<upstream::Answer>, SendError> {
        let answer = self.send_unjudged(lease, body, leg, fresh).await?;
        if is_engine_failure(answer.head.status.as_u16()) {
            lease.note_failed(LegFault::Failed);
        }
        Ok(answer)
    }

    /// As [`Self::send`], for a leg whose failure says nothing of its engine.
    pub(crate) async fn send_unjudged(
        &self,
        lease: &SlotLease,
        body: LegBody,
        leg: Option<&Leg>,
        fresh: bool,
    ) -> Result<Box<upstream::Answer>, SendError> {
        let mut extra = Vec::new();
        if let Some(rank) = lease.picked.rank_header {
            extra.push((headers::DP_RANK, HeaderValue::from(rank)));
        }
        if let Some(id) = leg.and_then(|leg| leg.request_id.as_deref()) {
            let id = HeaderValue::try_from(id).map_err(http::Error::from)?;
            extra.push((headers::REQUEST_ID, id));
        }
        if let Some((parent_id, header)) = trace_context::leg(&self.app, self.trace) {
            lease.note_parent(parent_id);
            extra.push((trace_context::TRACEPARENT, header));
        }
        let (path, headers) = (self.route.path(), &self.headers);
        lease.begin();
        let answer = lease
            .upstream()
            .send(&Method::POST, path, headers, &extra, body, fresh)
            .await?;
        lease.note_head(answer.head.status);
        // A client's mistake proves a living engine; its own failures prove nothing.
        if answer.head.status.as_u16() < 500 {
            lease.note_answer();
        }
        Ok(answer)
    }

    /// Sends the prefill leg, and notes in `written` when the engine had it.
    pub(crate) async fn send_prefill(
        &self,
        lease: &SlotLease,
        leg: &Leg,
        fresh: bool,
        written: Option<Written>,
    ) -> Result<Box<upstream::Answer>, SendError> {
        let body = LegBody::new(self.request.prefill_body(&leg.params), written);
        self.send(lease, body, Some(leg), fresh).await
    }

    /// Sends the decode leg, with what `leg` adds or as the client sent it.
    pub(crate) async fn send_decode(
        &self,
        lease: &SlotLease,
        leg: Option<&Leg>,
        fresh: bool,
    ) -> Result<Box<upstream::Answer>, SendError> {
        let params = leg.map(|leg| leg.params.as_str());
        let body = self.request.decode_body(params);
        let body = LegBody::new(body, Some(self.written.clone()));
        self.send(lease, body, leg, fresh).await
    }

    /// The engine id at the prefill slot, for a connector that needs it.
    pub(crate) async fn engine_id(&self, lease: &SlotLease) -> Result<Option<Arc<str>>, SendError> {
        if !self.connector.needs_engine_id() {
            return Ok(None);
        }
        let config = self.app.config();
        rarely(bootstrap::engine_id(&config, lease)).await.map(Some)
    }
}

/// A chosen slot as connectors see it.
pub(crate) fn slot<'a>(lease: &'a SlotLease, engine_id: Option<&'a str>) -> Slot<'a> {
    Slot {
        peer: lease.instance().peer(),
        rank: lease.picked.rank,
        engine_id,
    }
}

/// Whether a status says that the engine, or what stands in front of it, has failed. Another one, such
/// as 501, says something of the request.
fn is_engine_failure(status: u16) -> bool {
    matches!(status, 500 | 502 | 503 | 504)
}

/// A future that few requests wait for, on the heap: the others would have room for it in a state
/// that is moved as they go.
pub(crate) fn rarely<F: Future>(future: F) -> Pin<Box<F>> {
    Box::pin(future)
}
