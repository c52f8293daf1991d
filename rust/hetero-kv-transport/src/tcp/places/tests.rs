//! Who makes room for whom, without a server.

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;

/// A connection, and the other end of it.
fn connection() -> (Arc<OwnedFd>, OwnedFd) {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .expect("a pair of sockets");
    (Arc::new(ours), theirs)
}

fn is_shut(theirs: &OwnedFd) -> bool {
    rustix::io::read(theirs, &mut [0; 1]) == Ok(0)
}

#[test]
fn the_oldest_stranger_makes_room_and_readers_do_not() {
    let places = Places::new(3);
    let connections: Vec<_> = (0..6).map(|_| connection()).collect();
    let take = |at: usize| places.take(&connections[at].0);
    let mut first = take(0).expect("room");
    let second = take(1).expect("room");
    let third = take(2).expect("room");
    assert!(first.is_of_reader(), "the first is taken as a reader");
    let fourth = take(3).expect("room that another makes");
    assert_eq!(fourth.terms(), Terms::Serve);
    assert!(second.is_lost() && is_shut(&connections[1].1));
    assert!(!first.is_lost() && !third.is_lost() && !is_shut(&connections[2].1));
    let mut second = second;
    assert!(!second.is_of_reader(), "it has made room before");
    assert_eq!(places.open(), 4, "its thread has not ended");
    drop(second);
    assert_eq!(places.open(), 3);

    let (mut third, mut fourth) = (third, fourth);
    assert!(third.is_of_reader() && fourth.is_of_reader());
    let fifth = take(4).expect("it is to be told");
    assert_eq!(fifth.terms(), Terms::Refuse { most: 3 });
    drop(first);
    let sixth = take(5).expect("a reader has left");
    assert_eq!(sixth.terms(), Terms::Serve);
    drop((third, fourth, fifth, sixth));
    assert_eq!(places.open(), 0);
}

#[test]
fn refusals_and_connections_that_end_are_bounded() {
    let places = Places::new(1);
    let connections: Vec<_> = (0..ENDING_MAX + REFUSALS_MAX + 3)
        .map(|_| connection())
        .collect();
    let mut held: Vec<Place> = Vec::new();
    for (stream, _) in &connections[..=ENDING_MAX] {
        held.push(places.take(stream).expect("room that another makes"));
    }
    let next = &connections[ENDING_MAX + 1].0;
    assert!(places.take(next).is_none(), "none of the threads ends");
    let last = held.pop();
    held.clear();
    let mut last = last.expect("more than one");
    assert!(last.is_of_reader());
    for (stream, _) in &connections[ENDING_MAX + 2..ENDING_MAX + 2 + REFUSALS_MAX] {
        held.push(places.take(stream).expect("it is to be told"));
    }
    assert!(places.take(next).is_none());
    drop((last, held));
    assert_eq!(places.open(), 0);
}
