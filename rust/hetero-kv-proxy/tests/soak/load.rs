//! The clients: what they ask, and what each has to be answered with.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until};

use crate::client::{Client, Reply};
use crate::operator::Draw;

const REQUESTS_PER_S: u64 = 200;
const TOKENS_MAX: u64 = 20;
/// Of a hundred clients, how many leave before the end of their answer.
const LEAVE_PERCENT: u64 = 4;
const STREAM_PERCENT: u64 = 60;
/// The statuses by which a proxy may say that it cannot serve at this moment.
const FAILURES: [u16; 5] = [429, 500, 502, 503, 504];

pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// What a prompt is answered with, a word a token.
pub(crate) fn answer_words(prompt: &str, tokens: u64) -> Vec<String> {
    (0..tokens).map(|at| format!("{prompt}/{at} ")).collect()
}

/// One event of a stream.
pub(crate) fn event(word: &str) -> String {
    let choice = json!({"index": 0, "text": word});
    format!("data: {}\n\n", json!({"choices": [choice]}))
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) sent: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) left: u64,
}

#[derive(Default)]
pub(crate) struct Tally {
    counts: Mutex<Counts>,
    failures: Mutex<BTreeMap<String, u64>>,
    wrong: Mutex<Vec<String>>,
}

impl Tally {
    pub(crate) fn counts(&self) -> Counts {
        *self.counts.lock().expect("counts")
    }

    pub(crate) fn failures(&self) -> BTreeMap<String, u64> {
        self.failures.lock().expect("failures").clone()
    }

    pub(crate) fn wrong(&self) -> Vec<String> {
        self.wrong.lock().expect("wrong").clone()
    }

    fn count(&self, ended: Ended) {
        let mut counts = self.counts.lock().expect("counts");
        match ended {
            Ended::Completed => counts.completed += 1,
            Ended::Left => counts.left += 1,
            Ended::Failed(why) => {
                counts.failed += 1;
                let mut failures = self.failures.lock().expect("failures");
                *failures.entry(why).or_default() += 1;
            }
            Ended::Wrong(what) => {
                // It must not look like a request that was lost as well.
                counts.completed += 1;
                let mut wrong = self.wrong.lock().expect("wrong");
                if wrong.len() < 20 {
                    wrong.push(what);
                }
            }
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts {
            sent,
            completed,
            failed,
            left,
        } = self.counts();
        let wrong = self.wrong().len();
        write!(
            f,
            "{sent} sent, {completed} completed, {failed} failed {:?}, {left} left, {wrong} wrong",
            self.failures()
        )
    }
}

enum Ended {
    Completed,
    Failed(String),
    Left,
    Wrong(String),
}

/// Sends at an even rate whatever comes back, and waits for all answers.
pub(crate) async fn run(proxy: SocketAddr, tally: Arc<Tally>, end: Instant, seed: u64) {
    let mut draw = Draw::new(seed);
    let mut clients = JoinSet::new();
    let interval = Duration::from_micros(1_000_000 / REQUESTS_PER_S);
    let mut next = Instant::now();
    let mut number = 0_u64;
    while Instant::now() < end {
        number += 1;
        let asked = Asked {
            prompt: format!(
                "soak {seed}-{number} {}",
                "x".repeat(draw.below(300) as usize)
            ),
            tokens: 1 + draw.below(TOKENS_MAX),
            stream: draw.below(100) < STREAM_PERCENT,
            leaves_after: (draw.below(100) < LEAVE_PERCENT)
                .then(|| Duration::from_millis(draw.below(80))),
        };
        tally.counts.lock().expect("counts").sent += 1;
        let tally = Arc::clone(&tally);
        clients.spawn(async move { tally.count(ask(proxy, asked).await) });
        while let Some(ended) = clients.try_join_next() {
            ended.expect("no client panics");
        }
        next += interval;
        sleep_until(next.into()).await;
    }
    while let Some(ended) = clients.join_next().await {
        ended.expect("no client panics");
    }
}

struct Asked {
    prompt: String,
    tokens: u64,
    stream: bool,
    leaves_after: Option<Duration>,
}

async fn ask(proxy: SocketAddr, asked: Asked) -> Ended {
    let body = json!({
        "model": "m",
        "prompt": asked.prompt,
        "max_tokens": asked.tokens,
        "stream": asked.stream,
    });
    let mut client = Client::connect(proxy).await;
    client
        .post("/v1/completions", &[], body.to_string().as_bytes())
        .await;
    let Some(leaves_after) = asked.leaves_after else {
        return judge(&asked, client.reply().await);
    };
    tokio::select! {
        reply = client.reply() => judge(&asked, reply),
        () = sleep(leaves_after) => Ended::Left,
    }
}

fn judge(asked: &Asked, reply: Reply) -> Ended {
    let shown = || format!("{:?}: {} {:?}", asked.prompt, reply.status, reply.text());
    if reply.status != 200 {
        let body: Value = serde_json::from_slice(&reply.body).unwrap_or(Value::Null);
        if !FAILURES.contains(&reply.status) || !body["error"]["message"].is_string() {
            return Ended::Wrong(shown());
        }
        let code = body["error"]["code"].as_str().unwrap_or("of the engine");
        return Ended::Failed(format!("{} {code}", reply.status));
    }
    let words = answer_words(&asked.prompt, asked.tokens);
    if asked.stream {
        let events: Vec<String> = words.iter().map(|word| event(word)).collect();
        let whole = events.concat() + DONE;
        let text = reply.text();
        if text == whole && reply.whole {
            return Ended::Completed;
        }
        // What came before a break is right, and the break is told.
        let told = text.find("data: {\"error\"");
        let right = told.is_some_and(|at| whole.starts_with(text[..at].trim_end()));
        return match right && !text.contains(DONE) {
            true => Ended::Failed("stream broke".to_owned()),
            false => Ended::Wrong(shown()),
        };
    }
    if !reply.whole {
        return Ended::Failed("answer cut short".to_owned());
    }
    let body: Value = serde_json::from_slice(&reply.body).unwrap_or(Value::Null);
    match body["choices"][0]["text"] == json!(words.concat()) {
        true => Ended::Completed,
        false => Ended::Wrong(shown()),
    }
}
