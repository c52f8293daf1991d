use super::*;

/// Two prefill engines of two ranks each: `p0` and `p1`, incarnations 10 and 11.
struct Fixed;

impl Directory for Fixed {
    fn engine(&self, name: &RankName) -> Option<EnginePlace> {
        let instance = match (name.engine.as_str(), name.incarnation) {
            ("p0", 10) => 0,
            ("p1", 11) => 1,
            _ => return None,
        };
        Some(EnginePlace { instance, dp: 0 })
    }

    fn at_address(&self, dialled: &str) -> Option<(EnginePlace, u32, u32)> {
        let pid: u32 = dialled.strip_prefix("pid ")?.parse().ok()?;
        let instance = pid.checked_sub(100)? / 2;
        (instance < 2).then_some((EnginePlace { instance, dp: 0 }, pid % 2, 0))
    }
}

fn rank(instance: u32, tp: u32) -> RankName {
    RankName {
        engine: format!("p{instance}"),
        incarnation: u64::from(10 + instance),
        tp,
        pp: 0,
    }
}

/// A read of rank 1.0.1.
fn read() -> SourceRead {
    SourceRead {
        transfer_id: "ab".into(),
        reader: (0, 0),
        source: rank(1, 1),
        session: Some(rank(1, 1)),
        dialled: Some("pid 103".into()),
        engine: "p1".into(),
        tp: 1,
        bytes: 64,
        transport: "process".into(),
        why: None,
    }
}

/// One read, acknowledged to these engines in turn, before the read or after it.
fn traced(read: &SourceRead, heard_by: &[u32], early: bool, gaps: bool) -> (Agreement, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.jsonl");
    let mut trace = Trace::create(&path, gaps).expect("a file");
    let acknowledge = |trace: &mut Trace| {
        for instance in heard_by {
            let engine = EnginePlace {
                instance: *instance,
                dp: 0,
            };
            trace.acknowledged(engine, "ab").expect("written");
        }
    };
    if early {
        acknowledge(&mut trace);
    }
    let reader = EnginePlace { instance: 0, dp: 3 };
    trace
        .read(7, "ok", reader, std::slice::from_ref(read), &Fixed)
        .expect("written");
    if !early {
        acknowledge(&mut trace);
    }
    let found = trace.finish().expect("written");
    (found, std::fs::read_to_string(path).expect("text"))
}

#[test]
fn four_parts_that_name_one_rank_agree() {
    for early in [false, true] {
        let (found, text) = traced(&read(), &[1], early, false);
        assert_eq!((found.reads, found.agree, found.wrong), (1, 1, 0));
        assert_eq!(
            text,
            "{\"request\":7,\"transfer_id\":\"ab\",\"outcome\":\"ok\",\"reader\":\"0.3.0\",\
             \"bytes\":64,\"transport\":\"process\",\"session\":\"1.0.1\",\
             \"dialled\":\"pid 103\",\"dialled_rank\":\"1.0.1\",\"read\":\"1.0.1\",\
             \"acknowledged\":\"1.0\",\"agree\":true}\n"
        );
    }
}

#[test]
fn one_part_that_names_another_rank_is_wrong() {
    let with = |change: fn(&mut SourceRead)| {
        let mut changed = read();
        change(&mut changed);
        changed
    };
    for changed in [
        with(|read| read.session = Some(rank(1, 0))),
        with(|read| read.session = Some(rank(0, 1))),
        with(|read| read.dialled = Some("pid 101".into())),
        with(|read| read.source = rank(1, 0)),
    ] {
        // Also where something was broken on purpose.
        let (found, _) = traced(&changed, &[1], false, true);
        assert_eq!(
            (found.reads, found.agree, found.wrong),
            (1, 0, 1),
            "{changed:?}"
        );
    }
    let (found, text) = traced(&read(), &[0], false, true);
    assert_eq!((found.agree, found.wrong), (0, 1), "{text}");
}

#[test]
fn silence_is_wrong_unless_something_was_broken() {
    let with = |change: fn(&mut SourceRead)| {
        let mut changed = read();
        change(&mut changed);
        changed
    };
    let silent = [
        (with(|read| read.session = None), &[1][..]),
        (with(|read| read.dialled = None), &[1]),
        (with(|read| read.dialled = Some("127.0.0.1:9".into())), &[1]),
        // Another start of the engine.
        (with(|read| read.source.incarnation = 9), &[1]),
        (read(), &[]),
    ];
    for (read, heard_by) in silent {
        let (found, text) = traced(&read, heard_by, false, false);
        assert_eq!((found.agree, found.wrong), (0, 1), "{text}");
        let (found, text) = traced(&read, heard_by, false, true);
        assert_eq!((found.agree, found.wrong), (0, 0), "{text}");
    }
}
