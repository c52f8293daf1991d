//! How long a leg is listened to behind its client.

use super::*;

#[test]
fn a_leg_is_listened_to_for_as_long_as_it_ran_within_bounds() {
    let ms = |ran| late_answer(Duration::from_millis(ran)).as_millis();
    assert_eq!((ms(0), ms(249), ms(250)), (250, 250, 250));
    assert_eq!((ms(400), ms(1_000), ms(60_000)), (400, 1_000, 1_000));
}

/// An answer that comes so many milliseconds behind the moment at which this process ran again.
async fn is_heard(slept_ms: u64, behind_ms: u64) -> bool {
    let (tell, told) = tokio::sync::oneshot::channel();
    let heard = tokio::spawn(listen(Box::pin(told), Duration::from_millis(500)));
    tokio::task::yield_now().await;
    // The one thread of this runtime, and with it all that listens.
    std::thread::sleep(Duration::from_millis(slept_ms));
    tokio::time::sleep(Duration::from_millis(behind_ms)).await;
    // Nobody listens any more where it took too long.
    let _ = tell.send(());
    heard.await.expect("no panic").is_some()
}

#[tokio::test]
async fn what_this_process_slept_through_is_a_part_of_the_time_and_not_all_of_it() {
    assert!(is_heard(0, 10).await);
    assert!(is_heard(800, 10).await);
    assert!(!is_heard(0, 900).await);
}
