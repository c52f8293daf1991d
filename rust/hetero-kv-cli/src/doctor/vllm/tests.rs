use super::*;

#[test]
fn versions_are_read_and_the_supported_ones_are_those_of_the_package() {
    assert_eq!(major_minor("0.32.0"), Some((0, 32)));
    assert_eq!(major_minor("0.32.1rc2.dev3+cpu"), Some((0, 32)));
    assert_eq!(major_minor("0.33rc1"), Some((0, 33)));
    for bad in ["", "1", "a.b", "0.", "v0.32"] {
        assert_eq!(major_minor(bad), None, "{bad}");
    }
    // pip is told the same by the package's extra.
    let project = include_str!("../../../../../pyproject.toml");
    assert!(project.contains(&format!("\"vllm{}\"", supported_text())));
}
