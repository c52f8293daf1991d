//! Limits that change while seats are taken.

use super::*;

fn free(seats: &Arc<Seats>) -> usize {
    let taken: Vec<Seat> = std::iter::from_fn(|| seats.try_take()).collect();
    taken.len()
}

#[test]
fn a_lower_limit_takes_free_seats_at_once_and_taken_ones_when_they_are_given_back() {
    let seats = Arc::new(Seats::new(4));
    let mut taken: Vec<Seat> = std::iter::from_fn(|| seats.try_take()).take(3).collect();
    seats.set(1);
    assert_eq!((free(&seats), seats.taken_count()), (0, 3));
    taken.pop();
    assert_eq!(seats.taken_count(), 2);
    taken.pop();
    assert_eq!(free(&seats), 0, "one is taken, and one is all there is");
    taken.pop();
    assert_eq!((free(&seats), seats.taken_count()), (1, 0));
    seats.set(6);
    assert_eq!((free(&seats), seats.taken_count()), (6, 0));
}

#[test]
fn a_limit_that_rises_again_keeps_taken_seats_before_it_makes_new_ones() {
    let seats = Arc::new(Seats::new(3));
    let taken: Vec<Seat> = std::iter::from_fn(|| seats.try_take()).collect();
    seats.set(1);
    seats.set(4);
    assert_eq!(free(&seats), 1);
    drop(taken);
    assert_eq!(free(&seats), 4);
}

#[tokio::test]
async fn who_waits_is_served_by_a_higher_limit() {
    let seats = Arc::new(Seats::new(1));
    let _taken = seats.try_take();
    let waits = tokio::spawn({
        let seats = Arc::clone(&seats);
        async move { seats.take().await.is_some() }
    });
    tokio::task::yield_now().await;
    seats.set(2);
    let served = tokio::time::timeout(std::time::Duration::from_secs(5), waits).await;
    assert!(served.expect("it is served").expect("it ends"));
}
