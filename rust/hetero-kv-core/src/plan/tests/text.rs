//! Shapes as people write them, and stages as vLLM cuts them.

use super::grouped;
use crate::layout::KvHeads;
use crate::plan::{EngineShape, InstanceShape, KvShape, LayerRange, stage_layers};

#[test]
fn shapes_read_as_they_are_written() {
    for (text, instances, dp, tp, pp) in [
        ("dp=8,tp=1", 1, 8, 1, 1),
        ("tp=8,dp=1", 1, 1, 8, 1),
        ("2xdp=1,tp=8", 2, 1, 8, 1),
        ("3xpp=2,tp=4,dp=1024", 3, 1024, 4, 2),
    ] {
        let shape: InstanceShape = text.parse().expect("in the grammar");
        let engine = EngineShape { dp, tp, pp };
        assert_eq!(shape, InstanceShape { instances, engine }, "{text}");
        assert_eq!(shape.to_string().parse(), Ok(shape));
    }
    for (text, problem) in [
        ("", "\"\" in \"\" is not KEY=NUMBER"),
        ("dp=8", "tp is missing in \"dp=8\""),
        ("tp=8", "dp is missing in \"tp=8\""),
        ("dp=8,tp", "\"tp\" in \"dp=8,tp\" is not KEY=NUMBER"),
        ("dp=8,tp=1,", "\"\" in \"dp=8,tp=1,\" is not KEY=NUMBER"),
        ("dp=8,tp=1,tp=2", "tp is given twice in \"dp=8,tp=1,tp=2\""),
        ("dp=8,ep=1", "unknown key \"ep\" in \"dp=8,ep=1\""),
        ("dp=0,tp=1", "dp \"0\" is not a number from 1 to 1024"),
        ("dp=1,tp=1025", "tp \"1025\" is not a number from 1 to 1024"),
        ("dp=+1,tp=1", "dp \"+1\" is not a number from 1 to 1024"),
        ("dp=1,tp= 1", "tp \" 1\" is not a number from 1 to 1024"),
        (
            "dp=1,tp=99999999999",
            "tp \"99999999999\" is not a number from 1 to 1024",
        ),
        (
            "0xdp=1,tp=1",
            "number of instances \"0\" is not a number from 1 to 1024",
        ),
        (
            "xdp=1,tp=1",
            "number of instances \"\" is not a number from 1 to 1024",
        ),
    ] {
        let error = text.parse::<InstanceShape>().expect_err(text);
        assert_eq!(error.problem, problem);
        assert!(error.to_string().contains("[Nx]dp=D,tp=T[,pp=P]"));
    }
    let long = "dp=1,".repeat(1000);
    let error = long.parse::<InstanceShape>().expect_err("too long");
    assert_eq!(error.problem, "5000 bytes are too many");
}

#[test]
fn a_shape_leaves_out_what_is_1() {
    for text in ["dp=8,tp=1", "2xdp=1,tp=8", "3xdp=1024,tp=4,pp=2"] {
        let shape: InstanceShape = text.parse().expect("in the grammar");
        assert_eq!(shape.to_string(), text);
    }
}

#[test]
fn kv_layouts_read_as_they_are_written() {
    let gqa: KvShape = "gqa:8:128".parse().expect("in the grammar");
    assert_eq!(gqa.heads(), grouped(8));
    assert_eq!(gqa.elements_per_head_token(), 256);
    let mla: KvShape = "mla:576".parse().expect("in the grammar");
    assert_eq!(mla.heads(), KvHeads::Latent);
    assert_eq!(mla.elements_per_head_token(), 576);
    for shape in [gqa, mla] {
        assert_eq!(shape.to_string().parse(), Ok(shape));
    }
    for text in [
        "",
        "gqa",
        "gqa:8",
        "gqa:8:128:1",
        "gqa:0:128",
        "gqa:8:0",
        "gqa:8:-1",
        "mla",
        "mla:",
        "mla:0",
        "mla:576:1",
        "mha:8:128",
        "gqa:8:70000",
        "mla:٣",
    ] {
        let error = text.parse::<KvShape>().expect_err(text);
        assert!(error.to_string().contains("mla:LATENT"), "{error}");
    }
}

#[test]
fn stages_share_out_layers_as_vllm_does() {
    // vLLM's get_pp_indices: what does not divide goes to the last stages but one.
    for (layers, pp_size, past_lasts) in [
        (4, 1, &[4][..]),
        (8, 2, &[4, 8]),
        (7, 2, &[4, 7]),
        (61, 4, &[15, 30, 46, 61]),
        (62, 4, &[15, 31, 47, 62]),
        (63, 4, &[16, 32, 48, 63]),
        (3, 3, &[1, 2, 3]),
    ] {
        let ranges = stage_layers(layers, pp_size).expect("enough layers");
        let mut first = 0;
        for (range, &past_last) in ranges.iter().zip(past_lasts) {
            assert_eq!(
                *range,
                LayerRange { first, past_last },
                "{layers} / {pp_size}"
            );
            first = past_last;
        }
        assert_eq!(ranges.len(), past_lasts.len());
    }
    assert_eq!(
        stage_layers(3, 4)
            .expect_err("a stage would be empty")
            .to_string(),
        "pp_size 4 is not in 1..=3, the number of layers"
    );
    assert!(stage_layers(3, 0).is_err());
}
