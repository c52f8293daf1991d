use super::*;

type Owned = (String, Vec<(String, String)>, f64);

fn one(line: &str) -> Option<Owned> {
    samples(line).next().map(|sample| {
        let labels = sample.labels.iter();
        (
            sample.name.to_owned(),
            labels
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect(),
            sample.value,
        )
    })
}

#[test]
fn lines_of_every_form_are_read() {
    for (line, name, labels, value) in [
        ("up 1", "up", vec![], 1.0),
        ("vllm:x_total{} 2.5e3", "vllm:x_total", vec![], 2500.0),
        (
            "a{engine=\"0\",model_name=\"m\"} 3 1700000000000",
            "a",
            vec![("engine", "0"), ("model_name", "m")],
            3.0,
        ),
        (
            r#"a{path="C:\\x \"y\" } z\n", b = "," ,} 4"#,
            "a",
            vec![("path", "C:\\x \"y\" } z\n"), ("b", ",")],
            4.0,
        ),
    ] {
        let labels = labels
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        assert_eq!(one(line), Some((name.to_owned(), labels, value)), "{line}");
    }
}

#[test]
fn other_lines_are_passed_over() {
    for line in [
        "",
        "# TYPE a counter",
        "a",
        "a{",
        "a{b",
        "a{b=\"",
        "a{b=\"c",
        "a{b=\"c\\",
        "a{b=\"c\"} ",
        "a{b=\"c\"} x",
        "<html>no metrics here</html>",
    ] {
        assert_eq!(one(line), None, "{line}");
    }
    let text = "# HELP a b\nbad{ 1\na 1\n\nb{c=\"d\"} 2\n";
    let names: Vec<_> = samples(text).map(|sample| sample.name).collect();
    assert_eq!(names, ["a", "b"]);
}
