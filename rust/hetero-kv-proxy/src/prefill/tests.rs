//! How long a leg is listened to behind its client.

use super::*;

#[test]
fn a_leg_is_listened_to_for_as_long_as_it_ran_within_bounds() {
    let ms = |ran| late_answer(Duration::from_millis(ran)).as_millis();
    assert_eq!((ms(0), ms(249), ms(250)), (250, 250, 250));
    assert_eq!((ms(400), ms(1_000), ms(60_000)), (400, 1_000, 1_000));
}
