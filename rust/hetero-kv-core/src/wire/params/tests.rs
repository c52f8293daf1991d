use super::*;

fn sample() -> RemotePrefill {
    RemotePrefill {
        transfer_id: TransferId([7; 16]),
        engine: EngineId::new("p0_dp1").expect("valid"),
        incarnation: Incarnation(0x1234),
        host: "10.0.0.1".into(),
        port: 4711,
        dp_rank: DpRank(1),
        request_id: "cmpl-1-0-abcd".into(),
        tp_size: 2,
        pp_size: 1,
        block_ids: vec![vec![BlockId(3), BlockId(9)]],
        num_tokens: 300,
        lease_epoch: 5,
        prompt_digest: PromptDigest([9; 32]),
    }
}

#[test]
fn what_p_answers_is_what_d_reads() {
    let sent = sample();
    let read = TransferParams::parse(&sent.to_json().to_string()).expect("parses");
    assert_eq!(read, TransferParams::Decode(Box::new(sent)));
}

#[test]
fn params_without_our_flags_are_an_ordinary_request() {
    for text in [
        "null",
        "{}",
        r#"{"do_remote_decode":false,"x":[1]}"#,
        r#"{"do_remote_prefill":null}"#,
    ] {
        assert_eq!(
            TransferParams::parse(text),
            Ok(TransferParams::Absent),
            "{text}"
        );
    }
}

#[test]
fn prefill_takes_an_id_or_none_and_ignores_nulls_of_other_connectors() {
    let text = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,
        "remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
    assert_eq!(
        TransferParams::parse(text),
        Ok(TransferParams::Prefill { transfer_id: None })
    );
    let text = format!(
        r#"{{"do_remote_decode":true,"transfer_id":"{}"}}"#,
        "0a".repeat(16)
    );
    assert_eq!(
        TransferParams::parse(&text),
        Ok(TransferParams::Prefill {
            transfer_id: Some(TransferId([10; 16]))
        })
    );
}

#[test]
fn each_key_missing_or_of_a_wrong_type_is_named() {
    let whole = sample().to_json();
    let keys: Vec<String> = whole.as_object().expect("object").keys().cloned().collect();
    let mut tried = 0;
    for key in keys {
        if key.starts_with("do_remote") {
            continue;
        }
        let wrong = [
            None,
            Some(json!({"a": 1})),
            Some(json!(-1)),
            Some(json!("")),
            Some(json!(1e300)),
        ];
        for value in wrong {
            let mut params = whole.clone();
            let map = params.as_object_mut().expect("object");
            match value.clone() {
                None => map.remove(&key),
                Some(value) => map.insert(key.clone(), value),
            };
            let error = TransferParams::parse(&params.to_string()).expect_err(&key);
            assert_eq!(error.field, key, "{value:?}: {error}");
            tried += 1;
        }
    }
    assert_eq!(tried, 14 * 5);
}

#[test]
fn huge_and_odd_values_are_refused() {
    let cases = [
        ("tp_size", json!(1_000_000_000u64)),
        ("remote_port", json!(65_536)),
        ("remote_host", json!("a".repeat(HOST_BYTES_MAX + 1))),
        ("remote_engine_id", json!("a".repeat(257))),
        (
            "remote_request_id",
            json!("a".repeat(REQUEST_ID_BYTES_MAX + 1)),
        ),
        ("remote_block_ids", json!([vec![0u32; BLOCKS_MAX + 1]])),
        (
            "remote_block_ids",
            json!(vec![Vec::<u32>::new(); GROUPS_MAX + 1]),
        ),
        ("remote_block_ids", json!([[4_294_967_296u64]])),
        ("remote_incarnation", json!("11112222333344445")),
        ("remote_incarnation", json!("1234")),
        ("remote_incarnation", json!("+000000000001234")),
        ("remote_host", json!("p0\nforged log line")),
        ("remote_request_id", json!("a\u{0}b")),
    ];
    for (field, value) in cases {
        let mut params = sample().to_json();
        params[field] = value;
        let error = TransferParams::parse(&params.to_string()).expect_err(field);
        assert_eq!(error.field, field);
    }
    let error = TransferParams::parse(&" ".repeat(PARAMS_BYTES_MAX + 1)).expect_err("too long");
    assert_eq!(error.field, "*");
}

#[test]
fn numbers_come_as_texts_too() {
    let mut params = sample().to_json();
    params["remote_port"] = json!("4711");
    let read = TransferParams::parse(&params.to_string()).expect("parses");
    assert_eq!(read, TransferParams::Decode(Box::new(sample())));
}

#[test]
fn a_version_or_a_contradiction_is_refused_by_name() {
    let mut params = sample().to_json();
    params["hetero_version"] = json!(2);
    let error = TransferParams::parse(&params.to_string()).expect_err("other version");
    assert_eq!(
        error.to_string(),
        "kv_transfer_params.hetero_version is 2, this engine takes 1"
    );
    let error = TransferParams::parse(r#"{"do_remote_decode":true,"do_remote_prefill":true}"#)
        .expect_err("both");
    assert_eq!(error.field, "do_remote_decode");
}
