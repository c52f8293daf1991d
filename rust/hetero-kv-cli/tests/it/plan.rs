use std::collections::BTreeSet;

use serde_json::Value;

use crate::run::hetero_kv;

/// `plan FLAGS --json` prints exactly the golden line. The golden files come from a program in
/// another language that finds holders head by head.
fn golden(name: &str, flags: &str) {
    let path = format!("{}/tests/golden/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let expected = std::fs::read_to_string(&path).expect("the golden file is in the repository");
    let run = hetero_kv(&format!("plan {flags} --json"));
    assert_eq!(run.stderr, "");
    assert_eq!(run.code, 0);
    assert_eq!(run.stdout, expected, "{name}");
}

#[test]
fn the_rfcs_headline_shape_reads_one_of_eight_holders() {
    golden(
        "mla_1x8_to_8x1",
        "--prefill dp=1,tp=8 --decode dp=8,tp=1 --kv mla:576",
    );
    golden(
        "gqa8_1x8_to_8x1",
        "--prefill dp=1,tp=8 --decode dp=8,tp=1 --kv gqa:8:128",
    );
}

#[test]
fn fan_in_joins_the_heads_of_both_sources() {
    golden(
        "gqa4_tp4_to_tp2",
        "--prefill dp=1,tp=4 --decode dp=1,tp=2 --kv gqa:4:64 --block-size 128 --dtype fp32",
    );
}

#[test]
fn the_owner_is_the_engine_that_is_read() {
    golden(
        "gqa8_2x2_to_1x1_owner1",
        "--prefill dp=2,tp=2 --decode dp=1,tp=1 --kv gqa:8:128 --owner 1",
    );
}

#[test]
fn replicated_heads_are_read_once_and_released_everywhere() {
    golden(
        "gqa2_tp8_to_tp4",
        "--prefill dp=1,tp=8 --decode dp=1,tp=4 --kv gqa:2:128",
    );
    golden(
        "gqa2_tp2_to_tp8",
        "--prefill dp=1,tp=2 --decode dp=1,tp=8 --kv gqa:2:128",
    );
    golden(
        "mla_tp4_to_tp4",
        "--prefill dp=1,tp=4 --decode dp=1,tp=4 --kv mla:576 --dtype fp8",
    );
}

#[test]
fn instances_and_stages_are_named_where_there_are_several() {
    golden(
        "gqa4_two_prefill_instances",
        "--prefill 2xdp=1,tp=2 --decode dp=2,tp=1 --kv gqa:4:64 --owner 1.0",
    );
    golden(
        "gqa4_two_prefill_instances",
        "--prefill dp=1,tp=2 --prefill tp=2,dp=1 --decode dp=2,tp=1 --kv gqa:4:64 --owner 1.0",
    );
    golden(
        "mla_pp2_to_pp3",
        "--prefill dp=1,tp=2,pp=2 --decode dp=1,tp=1,pp=3 --kv mla:576 --layers 7",
    );
}

/// Every dp and tp of the grammar that the rules allow, checked for what a reader relies on.
#[test]
fn all_small_shapes_cover_their_heads_and_release_the_owner() {
    for (prefill_dp, prefill_tp) in [(1, 1), (2, 2), (3, 4), (1, 8)] {
        for (decode_dp, decode_tp) in [(1, 1), (4, 2), (2, 4), (3, 8)] {
            for (kv, heads) in [("gqa:8:64", 8), ("gqa:2:64", 2), ("mla:64", 1)] {
                let owner = prefill_dp - 1;
                let run = hetero_kv(&format!(
                    "plan --prefill dp={prefill_dp},tp={prefill_tp} \
                     --decode dp={decode_dp},tp={decode_tp} --kv {kv} --owner {owner} --json"
                ));
                assert_eq!(run.code, 0, "{}", run.stderr);
                let plan: Value = serde_json::from_str(&run.stdout).expect("JSON only");
                let ranks = plan["ranks"].as_array().expect("rows");
                assert_eq!(ranks.len() as u64, decode_dp * decode_tp);
                let mut released = vec![BTreeSet::new(); decode_dp as usize];
                let mut covered = vec![BTreeSet::new(); decode_dp as usize];
                for rank in ranks {
                    let dp = number(&rank["dp"]) as usize;
                    let mut next = None;
                    for source in rank["sources"].as_array().expect("sources") {
                        assert_eq!(number(&source["dp"]), owner);
                        let [first, past_last] = pair(&source["heads"]);
                        assert!(next.is_none_or(|next| next == first));
                        next = Some(past_last);
                        covered[dp].extend(first..past_last);
                        let holder = [number(&source["dp"]), number(&source["tp"])];
                        let holders = rank["holders"].as_array().expect("holders");
                        assert!(holders.iter().any(|rank| pair(rank) == holder));
                    }
                    for rank in rank["release"].as_array().expect("release") {
                        released[dp].insert(pair(rank));
                    }
                }
                let owner_ranks: BTreeSet<_> = (0..prefill_tp).map(|tp| [owner, tp]).collect();
                assert!(released.iter().all(|ranks| *ranks == owner_ranks));
                assert!(covered.iter().all(|found| *found == (0..heads).collect()));
            }
        }
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

fn pair(value: &Value) -> [u64; 2] {
    [number(&value[0]), number(&value[1])]
}

#[test]
fn one_transfer_id_replays_on_every_engine() {
    let flags = "plan --prefill dp=1,tp=8 --decode dp=8,tp=1 --kv mla:576 --json --transfer-id";
    let sources = |id: &str| {
        let run = hetero_kv(&format!("{flags} {id}"));
        let plan: Value = serde_json::from_str(&run.stdout).expect("JSON only");
        let ranks = plan["ranks"].as_array().expect("rows").iter();
        ranks
            .map(|rank| number(&rank["sources"][0]["tp"]))
            .collect::<BTreeSet<_>>()
    };
    // Engine 3's example transfer is the id 3.
    assert_eq!(sources("00000000000000000000000000000003"), [6].into());
    assert_eq!(sources("00000000000000000000000000000007"), [7].into());
}

#[test]
fn people_get_a_table() {
    let run = hetero_kv("plan --prefill dp=1,tp=4 --decode dp=1,tp=2 --kv gqa:4:64");
    assert_eq!(run.code, 0);
    assert_eq!(
        run.stdout,
        "\
prefill dp=1,tp=4 -> decode dp=1,tp=2, gqa:4:64, 4 layers, blocks of 16 tokens, bf16
owner: prefill instance 0, dp 0; an example transfer per decode engine (--transfer-id HEX plans a given one)

DECODE RANK  READS    REGION                             BYTES/BLOCK/LAYER  HOLDERS     RELEASES
dp0 tp0      dp0 tp0  tokens 0..16, head 0, layers 0..4  4096               dp0 tp0..2  dp0 tp0..2
             dp0 tp1  tokens 0..16, head 1, layers 0..4  4096
dp0 tp1      dp0 tp2  tokens 0..16, head 2, layers 0..4  4096               dp0 tp2..4  dp0 tp2..4
             dp0 tp3  tokens 0..16, head 3, layers 0..4  4096
"
    );
}

#[test]
fn the_table_says_which_tokens_heads_and_layers_each_read_covers() {
    let run = hetero_kv(
        "plan --prefill dp=1,tp=1,pp=2 --decode dp=1,tp=2 --kv gqa:4:64 --layers 7 --tokens 100",
    );
    assert_eq!(run.code, 0);
    let table: Vec<&str> = run.stdout.lines().skip(3).collect();
    assert_eq!(
        table,
        [
            "DECODE RANK              READS        REGION                                  BYTES/BLOCK/LAYER  HOLDERS  RELEASES",
            "dp0 pp0 tp0 layers 0..7  dp0 pp0 tp0  tokens 0..100, heads 0..2, layers 0..4  8192               dp0 tp0  dp0 tp0",
            "                         dp0 pp1 tp0  tokens 0..100, heads 0..2, layers 4..7  8192",
            "dp0 pp0 tp1 layers 0..7  dp0 pp0 tp0  tokens 0..100, heads 2..4, layers 0..4  8192               dp0 tp0  dp0 tp0",
            "                         dp0 pp1 tp0  tokens 0..100, heads 2..4, layers 4..7  8192",
        ]
    );
}

/// The source rank of each decode rank's first read.
fn first_sources(flags: &str) -> Vec<u64> {
    let run = hetero_kv(&format!("plan {flags} --json"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let plan: Value = serde_json::from_str(&run.stdout).expect("JSON only");
    let ranks = plan["ranks"].as_array().expect("rows").iter();
    ranks
        .map(|rank| number(&rank["sources"][0]["tp"]))
        .collect()
}

#[test]
fn round_robin_is_the_rfcs() {
    let open = "--prefill 2xdp=1,tp=8 --decode dp=8,tp=1 --kv mla:576 --policy round_robin";
    assert_eq!(first_sources(open), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(
        first_sources(&format!("{open} --sequence 3")),
        [3, 4, 5, 6, 7, 0, 1, 2]
    );
    // Outside the gate each reads the rank at its own place.
    for shapes in [
        "--prefill dp=2,tp=8 --decode dp=8,tp=1 --kv mla:576",
        "--prefill dp=1,tp=8 --decode dp=8,tp=1 --kv gqa:1:64",
    ] {
        let fixed = first_sources(&format!("{shapes} --policy round_robin --sequence 3"));
        assert_eq!(fixed, [0; 8], "{shapes}");
    }
    let ranks = first_sources(
        "--prefill dp=1,tp=8 --decode dp=1,tp=4 --kv mla:576 --policy round-robin --sequence 3",
    );
    assert_eq!(ranks, [0, 2, 4, 6]);
}

#[test]
fn what_cannot_be_planned_exits_2_and_says_why() {
    for (flags, reason) in [
        (
            "--prefill dp=1,tp=2 --decode dp=1,tp=3 --kv gqa:6:128",
            "tp_size: producer 2, consumer 3",
        ),
        (
            "--prefill dp=1,tp=4 --decode dp=1,tp=8 --kv gqa:6:128",
            "kv_heads: producer tp_size 4 and 6 KV heads",
        ),
        (
            "--prefill dp=1,tp=1 --prefill dp=1,tp=2 --decode dp=1,tp=3 --kv mla:64",
            "prefill instance 1 and decode instance 0 refused",
        ),
        (
            "--prefill dp=2,tp=2 --decode dp=1,tp=1 --kv mla:64 --owner 2",
            "--owner names dp 2 of prefill instance 0, which has dp=2",
        ),
        (
            "--prefill dp=2,tp=2 --decode dp=1,tp=1 --kv mla:64 --owner 1.0",
            "--owner names instance 1 of 1 prefill instances",
        ),
        (
            "--prefill dp=2,tp=2 --decode dp=1,tp=1 --kv mla:64 --owner x",
            "expected [INSTANCE.]DP",
        ),
        (
            "--prefill dp=1,tp=2,pp=5 --decode dp=1,tp=1 --kv mla:64",
            "--prefill: pp_size 5 is not in 1..=4",
        ),
        (
            "--prefill 1024xdp=1024,tp=1024,pp=1024 --decode dp=1,tp=1 --kv mla:64",
            "--prefill: 1099511627776 workers in all, above the 8192",
        ),
        (
            "--prefill dp=1 --decode dp=1,tp=1 --kv mla:64",
            "tp is missing in \"dp=1\"; expected [Nx]dp=D,tp=T[,pp=P]",
        ),
        (
            "--prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mha:8:64",
            "expected gqa:HEADS_TOTAL:HEAD_DIM or mla:LATENT",
        ),
        (
            "--prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mla:64 --transfer-id 12",
            "transfer_id is not 16 bytes in hexadecimal",
        ),
        (
            "--prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mla:64 --layers 0",
            "0 is not in 1..=4096",
        ),
        (
            "--prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mla:64 --policy least",
            "invalid value 'least' for '--policy <POLICY>'\n  [possible values: hash, round_robin]",
        ),
        (
            "--prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mla:64 --tokens 0",
            "0 is not in 1..",
        ),
        (
            "--prefill dp=0,tp=1 --decode dp=1,tp=1 --kv mla:64",
            "dp \"0\" is not a number from 1 to 1024",
        ),
        (
            "--prefill dp=1,tp=1 --decode dp=1,tp=1000000000 --kv mla:64",
            "tp \"1000000000\" is not a number from 1 to 1024",
        ),
        ("--decode dp=1,tp=1 --kv mla:64", "--prefill"),
    ] {
        let run = hetero_kv(&format!("plan {flags} --json"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{flags}");
        assert!(run.stderr.contains(reason), "{flags}: {}", run.stderr);
    }
}
