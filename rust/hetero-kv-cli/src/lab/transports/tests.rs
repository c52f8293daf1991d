use super::{EnginePlace, RankName, SourceRead, Transports};

fn read(tp: u32, transport: &str, why: Option<&str>) -> SourceRead {
    let source = RankName {
        engine: "p0".into(),
        incarnation: 7,
        tp,
        pp: 0,
    };
    SourceRead {
        transfer_id: "ab".into(),
        reader: (0, 0),
        session: Some(source.clone()),
        source,
        dialled: None,
        engine: "p0".into(),
        tp,
        bytes: 64,
        transport: transport.into(),
        why: why.map(str::to_owned),
    }
}

const AT: EnginePlace = EnginePlace { instance: 0, dp: 0 };

#[test]
fn a_reason_counts_pairs_not_reads_whichever_process_it_names() {
    let mut found = Transports::default();
    for _ in 0..3 {
        found.note(
            AT,
            &[
                read(
                    0,
                    "tcp",
                    Some("process: not permitted to read process 71 of the same user"),
                ),
                read(
                    1,
                    "tcp",
                    Some("process: not permitted to read process 72 of the same user"),
                ),
                read(2, "tcp", Some("process is not offered")),
                read(3, "process", Some("process: scope 2, pid 9: 5 of 6")),
                read(4, "process", None),
            ],
        );
    }
    assert_eq!(
        found.json(),
        serde_json::json!({
            "process": {"reads": 6, "bytes": 384, "why": {"process: scope 2, pid N: 5 of 6": 1}},
            "tcp": {"reads": 9, "bytes": 576, "why": {
                "process is not offered": 1,
                "process: not permitted to read process N of the same user": 2,
            }},
        })
    );
    assert_eq!(found.names(), ["process", "tcp"]);
    assert_eq!(
        found.rows("auto"),
        [
            "transport   auto: 6 reads of 384 bytes together by process",
            "       1 pairs of ranks by process: process: scope 2, pid N: 5 of 6",
            "transport   auto: 9 reads of 576 bytes together by tcp",
            "       2 pairs of ranks by tcp: process: not permitted to read process N of the same user",
            "       1 pairs of ranks by tcp: process is not offered",
        ]
    );
}

#[test]
fn many_reasons_are_cut_in_the_table_and_said_to_be() {
    let mut found = Transports::default();
    for nth in 0..12 {
        found.note(AT, &[read(0, "tcp", Some(&format!("reason {nth}")))]);
    }
    let rows = found.rows("auto");
    assert_eq!(rows.len(), 12);
    assert_eq!(rows[11], "         2 reasons more, by --json");
}
