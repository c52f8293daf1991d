//! A peer by hand on the other end of a pipe.

use tokio::io::DuplexStream;

use super::*;

const LIMITS: Limits = Limits {
    frame_bytes_max: 300,
    frames_max: 2,
    within: Duration::from_secs(2),
    idle: Duration::from_secs(5),
};

fn greeting(major: u8, mechanism: &[u8]) -> Vec<u8> {
    let mut greeting = vec![0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = major;
    greeting[12..12 + mechanism.len()].copy_from_slice(mechanism);
    greeting
}

fn ready(kind: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x08Identity\0\0\0\0\x0bSocket-Type\0\0\0".to_vec();
    body.push(kind.len() as u8);
    body.extend_from_slice(kind.as_bytes());
    [&[COMMAND, body.len() as u8], body.as_slice()].concat()
}

fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    match u8::try_from(body.len()) {
        Ok(length) => [&[flags, length], body].concat(),
        Err(_) => {
            let length = (body.len() as u64).to_be_bytes();
            [&[flags | LONG], length.as_slice(), body].concat()
        }
    }
}

/// Our end and theirs, with these bytes on the way to ours.
async fn pipe(sent: &[&[u8]]) -> (DuplexStream, DuplexStream) {
    let (ours, mut theirs) = tokio::io::duplex(4_096);
    theirs.write_all(&sent.concat()).await.expect("room");
    (ours, theirs)
}

async fn dealer(sent: &[&[u8]]) -> (Peer<DuplexStream>, DuplexStream) {
    let hello = [greeting(3, b"NULL"), ready("DEALER")].concat();
    let (ours, theirs) = pipe(&[&[hello.as_slice()], sent].concat()).await;
    (Peer::accept(ours, LIMITS).await.expect("a peer"), theirs)
}

async fn refused(sent: &[&[u8]]) -> String {
    let (ours, theirs) = pipe(sent).await;
    let fault = Peer::accept(ours, LIMITS).await.expect_err("a fault");
    drop(theirs);
    fault.to_string()
}

#[tokio::test]
async fn messages_come_out_as_they_went_in() {
    let long = vec![b'x'; 300];
    let (mut peer, mut theirs) = dealer(&[
        &frame(0, b"one"),
        &frame(MORE, b""),
        &frame(0, &long),
        &frame(0, b""),
    ])
    .await;
    assert_eq!(peer.message().await.expect("first"), [b"one".to_vec()]);
    assert_eq!(
        peer.message().await.expect("second"),
        [Vec::<u8>::new(), long]
    );
    assert_eq!(peer.message().await.expect("third"), [Vec::<u8>::new()]);
    // What a ROUTER says: its greeting, and READY.
    let mut said = vec![0; GREETING_BYTES + 2];
    theirs.read_exact(&mut said).await.expect("a greeting");
    assert_eq!(said[..GREETING_BYTES], greeting(3, b"NULL"));
    let mut body = vec![0; usize::from(said[GREETING_BYTES + 1])];
    theirs.read_exact(&mut body).await.expect("READY");
    let properties = body.strip_prefix(b"\x05READY").expect("READY");
    let kind = property(properties, "socket-type").expect("whole");
    assert_eq!(kind, Some(b"ROUTER".as_slice()));
    drop(theirs);
    assert!(matches!(peer.message().await, Err(Fault::Closed)));
}

#[tokio::test]
async fn a_ping_is_answered_between_frames_and_other_commands_are_not() {
    let (mut peer, mut theirs) = dealer(&[
        &frame(COMMAND, b"\x09SUBSCRIBEx"),
        &frame(COMMAND, b"\x04PING\0\x07abc"),
        &frame(MORE, b""),
        &frame(COMMAND, b"\x04PING\0\x07"),
        &frame(0, b"one"),
    ])
    .await;
    let message = peer.message().await.expect("a message");
    assert_eq!(message, [Vec::<u8>::new(), b"one".to_vec()]);
    drop(peer);
    let mut said = Vec::new();
    theirs.read_to_end(&mut said).await.expect("all of it");
    let pongs = [frame(COMMAND, b"\x04PONGabc"), frame(COMMAND, b"\x04PONG")].concat();
    assert!(said.ends_with(&pongs), "{said:?}");
}

#[tokio::test]
async fn nothing_is_set_aside_for_a_length_that_is_only_claimed() {
    let claim = [&[LONG], (1u64 << 62).to_be_bytes().as_slice()].concat();
    let (mut peer, _theirs) = dealer(&[&claim]).await;
    assert!(matches!(peer.message().await, Err(Fault::TooLarge(_))));
    let (mut peer, _theirs) = dealer(&[&frame(0, &[0; 301])]).await;
    assert!(matches!(peer.message().await, Err(Fault::TooLarge(_))));
    let many = [frame(MORE, b""), frame(MORE, b""), frame(0, b"")].concat();
    let (mut peer, _theirs) = dealer(&[&many]).await;
    assert!(matches!(peer.message().await, Err(Fault::TooLarge(_))));
    // In the handshake too.
    let command = [&[COMMAND | LONG], (1u64 << 40).to_be_bytes().as_slice()].concat();
    let fault = refused(&[&greeting(3, b"NULL"), &command]).await;
    assert_eq!(fault, "a frame of more than 300 bytes");
}

#[tokio::test]
async fn who_is_no_dealer_is_refused_with_the_reason() {
    let http = [b"GET / HTTP/1.1\r\n".as_slice(), &[b' '; 64]].concat();
    assert_eq!(refused(&[&http]).await, "does not speak ZMTP");
    let fault = refused(&[&greeting(2, b"NULL")]).await;
    assert!(fault.starts_with("speaks ZMTP 2"), "{fault}");
    let fault = refused(&[&greeting(3, b"CURVE")]).await;
    assert!(fault.contains("\"CURVE\""), "{fault}");
    let hello = greeting(3, b"NULL");
    let fault = refused(&[&hello, &ready("SUB")]).await;
    assert_eq!(fault, "is a \"SUB\" socket; a DEALER registers");
    let fault = refused(&[&hello, &frame(0, b"READY")]).await;
    assert_eq!(fault, "did not send READY");
    let fault = refused(&[
        &hello,
        &frame(COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x09DEALER"),
    ])
    .await;
    assert_eq!(fault, "a READY that is cut short");
    let fault = refused(&[&hello, &frame(0x80, b"")]).await;
    assert_eq!(fault, "a frame with the flags 0x80");
}

#[tokio::test]
async fn whoever_is_slow_or_silent_is_let_go() {
    let limits = Limits {
        within: Duration::from_millis(40),
        idle: Duration::from_millis(80),
        ..LIMITS
    };
    let (ours, _theirs) = pipe(&[&greeting(3, b"NULL")]).await;
    let fault = Peer::accept(ours, limits).await.expect_err("no READY");
    assert!(matches!(fault, Fault::Slow(_)), "{fault}");
    let hello = [greeting(3, b"NULL"), ready("DEALER")].concat();
    for (sent, slow) in [(&[0, 9, b'x'][..], true), (&[], false)] {
        let (ours, _theirs) = pipe(&[&hello, sent]).await;
        let mut peer = Peer::accept(ours, limits).await.expect("a peer");
        let fault = peer.message().await.expect_err("an end");
        assert_eq!(matches!(fault, Fault::Slow(_)), slow, "{fault}");
        assert_eq!(matches!(fault, Fault::Idle(_)), !slow, "{fault}");
    }
    // A connection that ends within a message has broken.
    let (mut peer, theirs) = dealer(&[&[0, 9, b'x']]).await;
    drop(theirs);
    assert!(matches!(peer.message().await, Err(Fault::Io(_))));
}
