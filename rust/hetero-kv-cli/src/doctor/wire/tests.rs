use super::*;

#[test]
fn endpoints_are_read_as_they_are_written() {
    for text in ["10.0.0.1:7000", "prefill-0.example:1", "[fd00::1]:65535"] {
        assert_eq!(parse_endpoint(text).expect(text).to_string(), text);
    }
    for bad in [
        "",
        ":1",
        "a",
        "a:",
        "a:x",
        "a:65536",
        "fd00::1:7000",
        "[10.0.0.1]:1",
        "[fd00::1]",
        "a/b:1",
    ] {
        parse_endpoint(bad).expect_err(bad);
    }
}
