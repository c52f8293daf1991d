//! The wire's bytes: what version 1 is, and what happens to bytes that are not.

mod golden;
mod hostile;

use super::*;
use crate::ids::{
    BlockId, DpRank, EngineId, Epoch, Incarnation, LeaseRef, PpRank, PromptDigest, Slot, TpRank,
    TransferId,
};
use crate::testing::{card, fields};
use crate::wire::card::{Endpoints, ProcessEndpoint, TcpEndpoint, WorkerCard};
use crate::wire::message::{
    Accept, Ack, Challenge, Claim, EngineIdentity, Gone, GoneReason, Granted, Hello, Layout,
    Message, Proof, Reject, RejectCode, Release, Renew,
};

fn prefill() -> EngineIdentity {
    EngineIdentity {
        engine: EngineId::new("p0_dp1").expect("valid"),
        incarnation: Incarnation(0x1122_3344_5566_7788),
        dp_rank: DpRank(1),
        tp_size: 2,
        pp_size: 1,
        dp_size: 1,
    }
}

fn worker() -> WorkerCard {
    WorkerCard {
        dp_rank: DpRank(1),
        endpoints: Endpoints {
            process: Some(ProcessEndpoint {
                boot_id: "b".into(),
                pid_namespace: 4_026_531_836,
                pid: 4242,
                start_ticks: 99,
                nonce_address: 0x7f00_0000_1000,
                nonce: (0..16).collect(),
                lease_page_address: 0x7f00_0000_2000,
                lease_slots: 16_384,
                lease_page_nonce: 5,
            }),
            tcp: Some(TcpEndpoint {
                host: "fd00::1".into(),
                port: 5000,
            }),
            verbs: None,
            mori: None,
        },
        ..card(0, 2)
    }
}

/// One of each control message.
fn samples() -> Vec<Message> {
    let transfer_id = TransferId([7; 16]);
    vec![
        Message::Hello(Box::new(Hello {
            versions: (1, 1),
            from: EngineIdentity {
                engine: EngineId::new("d0").expect("valid"),
                incarnation: Incarnation(7),
                dp_rank: DpRank(0),
                tp_size: 1,
                pp_size: 1,
                dp_size: 1,
            },
            expect_engine: prefill().engine,
            expect_incarnation: prefill().incarnation,
            any_engine: false,
            compat_digest: vec![9; 32],
            nonce: None,
        })),
        Message::Accept(Accept {
            version: 1,
            from: prefill(),
            proof: None,
        }),
        Message::Reject(Box::new(Reject {
            code: RejectCode::Incompatible,
            reason: "no".into(),
            fields: Some(fields(&[("dtype", "float32"), ("model", "tiny")])),
        })),
        Message::Layout(Box::new(Layout {
            from: prefill(),
            workers: vec![worker()],
        })),
        Message::Claim(Claim {
            transfer_id,
            epoch: 300,
            prompt_digest: PromptDigest([10; 32]),
            question: 1,
        }),
        Message::Granted(Box::new(Granted {
            transfer_id,
            granted_ms: 30_000,
            lease: LeaseRef {
                slot: Slot(3),
                epoch: Epoch(300),
            },
            block_ids: vec![vec![BlockId(3), BlockId(70_000)]],
            num_tokens: 20,
            question: 1,
        })),
        Message::Gone(Gone {
            transfer_id,
            reason: GoneReason::Expired,
            question: 1,
        }),
        Message::Renew(Renew {
            transfer_id,
            question: 2,
        }),
        Message::Ack(Ack {
            transfer_id,
            ranks: vec![(TpRank(0), PpRank(0)), (TpRank(1), PpRank(0))],
            number: Some(3),
        }),
        Message::Release(Release {
            transfer_id,
            number: Some(4),
        }),
        Message::Ping,
        Message::Pong,
        Message::Bye,
        Message::Challenge(Challenge { nonce: vec![5; 32] }),
        Message::Proof(Proof { proof: vec![6; 32] }),
    ]
}

/// What a control connection makes of a stream of bytes.
fn read(bytes: &[u8]) -> Result<Vec<Message>, message::MessageError> {
    let mut decoder = FrameDecoder::new();
    decoder.push(bytes);
    let mut messages = Vec::new();
    while let Some((kind, payload)) = decoder.next_frame()? {
        messages.push(Message::from_frame(kind, &payload)?);
    }
    Ok(messages)
}

fn framed(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        kind,
        payload_bytes: payload.len(),
    };
    [&header.to_bytes(), payload].concat()
}
