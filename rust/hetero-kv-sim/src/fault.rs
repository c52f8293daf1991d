//! Everything that can go wrong in a run, and which failures of a request each of them explains.

use std::fmt;

use hetero_kv_core::failure::FailureReason;

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One kind of trouble.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// Every kind.
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

faults! {
    /// A control connection breaks; what was under way on it is lost.
    ConnectionBreaks,
    /// A frame takes seconds; those behind it wait, other connections overtake it.
    FrameDelayed,
    /// Two hosts cannot reach each other for a while; frames wait, dials hang.
    Partition,
    /// A claim, renewal, acknowledgement or release comes twice.
    FrameTwice,
    /// An acknowledgement comes rank by rank, and one of the ranks twice.
    AckSplit,
    /// A dial is refused.
    DialRefused,
    /// A read takes long.
    ReadSlow,
    /// A read hangs for longer than a load may take.
    ReadStalls,
    /// A read ends with an error.
    ReadFails,
    /// A data connection breaks under a read; what was in flight is posted again on the next one.
    DataBreaks,
    /// A stopped read takes seconds to be quiesced, and may land meanwhile.
    QuiesceSlow,
    /// A read lands in the new process at the address of the one that it was meant for.
    ReadStrays,
    /// A prefill engine is killed; its kernel closes what it had open.
    PrefillKilled,
    /// A decode engine is killed.
    DecodeKilled,
    /// One rank of a prefill engine dies, the engine some time later.
    RankKilled,
    /// A prefill engine's host loses power: nobody closes anything.
    PrefillVanishes,
    /// A killed engine starts again at the same address.
    Restart,
    /// A whole engine stands still for seconds and goes on.
    Pause,
    /// A forward pass takes seconds.
    StepLong,
    /// Clocks that run at unlike speeds.
    ClockDrift,
    /// The client leaves before its prefill is done.
    AbortInPrefill,
    /// The client leaves while its request waits in decode's queue.
    AbortQueued,
    /// The client leaves while decode reads.
    AbortLoading,
    /// The client leaves while decode computes.
    AbortRunning,
    /// A running request loses its blocks and starts over.
    Preemption,
    /// The router loses the decode leg.
    DecodeLegLost,
    /// The decode leg comes when the lease is over.
    DecodeLegLate,
    /// The decode leg comes twice to the same engine.
    DecodeLegTwice,
    /// The decode leg comes to two engines.
    DecodeLegElsewhere,
    /// A request comes with another one's params.
    ParamsMixedUp,
    /// A field of the params is changed on the way.
    ParamsChanged,
    /// Two prefills are given one transfer id.
    TransferIdTwice,
    /// vLLM rejects a decode request in front of the scheduler.
    Rejected,
    /// A prefill engine's cache is reset, its leases revoked.
    CacheReset,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Trouble between the two scheduler sides: any question or answer may come too late or never.
pub(crate) const CONTROL: &[Fault] = &[
    Fault::ConnectionBreaks,
    Fault::FrameDelayed,
    Fault::Partition,
    Fault::DialRefused,
    Fault::PrefillKilled,
    Fault::PrefillVanishes,
    Fault::RankKilled,
    Fault::Restart,
    Fault::Pause,
];

/// Trouble that ends a lease before its reader is done.
const LEASE_ENDS: &[Fault] = &[
    Fault::StepLong,
    Fault::DecodeLegLate,
    Fault::DecodeLegTwice,
    Fault::DecodeLegElsewhere,
    Fault::ParamsMixedUp,
    Fault::ParamsChanged,
    Fault::TransferIdTwice,
    Fault::CacheReset,
];

/// What may be behind a failure, beyond [`CONTROL`] where that is named. A failure in a run in which
/// none of these happened is the connector's own doing.
pub(crate) fn explains(reason: FailureReason) -> Vec<Fault> {
    let with_control = |more: &[Fault]| [CONTROL, more].concat();
    match reason {
        FailureReason::BadParams => vec![
            Fault::ParamsChanged,
            Fault::ParamsMixedUp,
            Fault::TransferIdTwice,
        ],
        FailureReason::DigestMismatch => vec![Fault::ParamsMixedUp],
        FailureReason::Unreachable => with_control(&[Fault::ParamsChanged]),
        FailureReason::PairRefused => vec![
            Fault::PrefillKilled,
            Fault::PrefillVanishes,
            Fault::RankKilled,
            Fault::ParamsChanged,
        ],
        FailureReason::LeaseGone => with_control(LEASE_ENDS),
        FailureReason::ClaimTimeout => with_control(&[]),
        // A reader that ran into the end of its load time says the same; the caller looks at that.
        FailureReason::LeaseExpired => with_control(&[Fault::StepLong]),
        FailureReason::LoadTimeout => with_control(&[
            Fault::StepLong,
            Fault::ReadSlow,
            Fault::ReadStalls,
            Fault::QuiesceSlow,
        ]),
        FailureReason::PeerLost => with_control(&[Fault::DataBreaks]),
        FailureReason::Fenced => with_control(
            &[
                LEASE_ENDS,
                &[Fault::ReadSlow, Fault::ReadStalls, Fault::ReadStrays],
            ]
            .concat(),
        ),
        FailureReason::Transport => vec![Fault::ReadFails],
        FailureReason::Cancelled => {
            vec![Fault::AbortQueued, Fault::AbortLoading, Fault::AbortRunning]
        }
        FailureReason::Plan => Vec::new(),
    }
}

/// What may be behind a lease that ends by time.
pub(crate) fn explains_expiry() -> Vec<Fault> {
    [
        CONTROL,
        &[
            Fault::StepLong,
            Fault::DecodeKilled,
            Fault::AbortInPrefill,
            Fault::DecodeLegLost,
            Fault::DecodeLegLate,
            Fault::ParamsMixedUp,
            Fault::ParamsChanged,
            Fault::TransferIdTwice,
        ],
    ]
    .concat()
}
