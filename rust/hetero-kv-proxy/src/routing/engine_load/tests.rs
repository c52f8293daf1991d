use super::*;

fn loads(text: &str, dp: u32) -> Option<Vec<(u32, u16)>> {
    let loads = EngineLoad::of_scrape(text, dp)?;
    Some(
        loads
            .iter()
            .map(|load| (load.requests, load.cache_used))
            .collect(),
    )
}

/// As vLLM 0.32 writes it.
const TWO: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/m"} 3.0
vllm:num_requests_running{engine="1",model_name="org/m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="org/m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="org/m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="org/m"} 0.5049
vllm:kv_cache_usage_perc{engine="1",model_name="org/m"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="org/m"} 17.0
"#;

#[test]
fn each_rank_has_what_its_engine_says() {
    assert_eq!(loads(TWO, 2), Some(vec![(5, 504), (0, 0)]));
    // One URL for all of them: their sum, and how full they are on average.
    assert_eq!(loads(TWO, 1), Some(vec![(5, 252)]));
    // Labels are ranks of a larger engine; their order is that of the ranks here, also of ten and up.
    let global = TWO
        .replace("engine=\"1\"", "engine=\"10\"")
        .replace("engine=\"0\"", "engine=\"9\"");
    assert_eq!(loads(&global, 2), Some(vec![(5, 504), (0, 0)]));
    // Not all ranks are told of: whose is whose is not known.
    assert_eq!(loads(TWO, 3), None);
}

#[test]
fn what_is_not_of_the_gauges_is_passed_over() {
    let odd = "vllm:num_requests_running 4\n";
    assert_eq!(loads(odd, 1), Some(vec![(4, 0)]));
    let tricky = "vllm:num_requests_running{model_name=\"a\\\"},engine=\\\"7\\\\\",engine=\"2\"} 4 1700000000\n";
    assert_eq!(loads(tricky, 1), Some(vec![(4, 0)]));
    for text in [
        "",
        "vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n",
        "vllm:num_requests_running{engine=\"0\"}\n",
        "vllm:num_requests_running{engine=\"0\"} NaN\n",
        "vllm:num_requests_running{engine=\"x\"} 1\n",
        "vllm:num_requests_running{engine=\"0\" 1\n",
        "vllm:num_requests_running{engine=\"0 1\n",
        "vllm:num_requests_runningx 1\n",
        "<html>404</html>",
    ] {
        assert_eq!(loads(text, 1), None, "{text}");
    }
    let huge = "vllm:num_requests_running 1e99\nvllm:kv_cache_usage_perc 7\n";
    assert_eq!(loads(huge, 1), Some(vec![(u32::MAX, 1_000)]));
    assert_eq!(
        loads("vllm:num_requests_running -3\n", 1),
        Some(vec![(0, 0)])
    );
}
