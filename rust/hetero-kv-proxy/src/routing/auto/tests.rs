use super::*;

const RULES: AutoRules = AutoRules {
    prompt_bytes_min: 2_048,
};

#[test]
fn length_hits_and_load_decide() {
    use Alone::{Busy, Known, Short};
    // prompt, known, prefill's load, decode's load
    for (prompt_bytes, known_bytes, prefill_load, decode_load, want) in [
        (0, 0, 0, 0, Some(Short)),
        (2_047, 0, 0, 99, Some(Short)),
        (2_047, 1_024, 99, 0, Some(Short)),
        (2_048, 0, 0, 0, None),
        (2_048, 1, 0, 99, Some(Known)),
        (10_000, 7_952, 0, 0, None),
        (10_000, 7_953, 0, 0, Some(Known)),
        // More known than asked for, as for a prompt that is a beginning of another.
        (4_000, 4_096, 0, 0, Some(Known)),
        (10_000, 0, 7, 0, None),
        (10_000, 0, 8, 0, Some(Busy)),
        (10_000, 0, 8, 1, Some(Busy)),
        (10_000, 0, 8, 2, None),
        (10_000, 0, u32::MAX, 0, Some(Busy)),
        (10_000, 0, u32::MAX, u32::MAX, None),
    ] {
        let scene = Scene {
            prompt_bytes,
            known_bytes,
            prefill_load,
            decode_load,
        };
        assert_eq!(RULES.alone(&scene), want, "{scene:?}");
    }
    // Nothing is too short then, and what is known whole stays on decode.
    let never = AutoRules {
        prompt_bytes_min: 0,
    };
    let scene = Scene {
        prompt_bytes: 0,
        known_bytes: 0,
        prefill_load: 0,
        decode_load: 0,
    };
    assert_eq!(never.alone(&scene), None);
}
