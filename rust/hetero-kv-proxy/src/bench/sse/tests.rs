//! Streams as engines and proxies send them, in pieces of every size.

use super::*;

fn whole(text: &str) -> Result<Counts, FailureKind> {
    in_pieces(text, text.len().max(1))
}

fn in_pieces(text: &str, size: usize) -> Result<Counts, FailureKind> {
    let mut stream = EventStream::default();
    for piece in text.as_bytes().chunks(size) {
        stream.push(piece).map_err(|failure| failure.kind)?;
    }
    stream.end().map_err(|failure| failure.kind)
}

const CHAT: &str = concat!(
    ": ping\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\u{e9}\"}}]}\r\n\r\n",
    "event: x\r\ndata: {\"choices\":[{\"index\":0,\r\ndata: \"delta\":{\"content\":\"\"}}]}\r\n\r\n",
    "data:{\"choices\":[{\"index\":0,\"delta\":{\"reasoning\":\"r\"}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"finish_reason\":\"stop\"}]}\r\n\r\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":5}}\r\n\r\n",
    "data: [DONE]\r\n\r\n",
);

#[test]
fn a_stream_is_counted_alike_in_pieces_of_every_size() {
    let want = Counts {
        chunks: 3,
        completion_tokens: Some(5),
        prompt_tokens: Some(7),
    };
    for size in 1..CHAT.len() {
        assert_eq!(in_pieces(CHAT, size), Ok(want), "pieces of {size}");
    }
    assert_eq!(want.tokens(), 5);
}

#[test]
fn completions_count_texts_and_not_the_bare_end() {
    let text = "data: {\"choices\":[{\"text\":\"a\"},{\"text\":\"b\"}]}\n\n\
                data: {\"choices\":[{\"text\":\"c\",\"finish_reason\":\"length\"}]}\n\n\
                data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\n\
                data: [DONE]\n\n";
    let counts = whole(text).expect("a whole stream");
    assert_eq!((counts.chunks, counts.tokens()), (3, 3));
}

#[test]
fn what_is_wrong_with_a_stream_has_its_name() {
    let chunk = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
    let done = "data: [DONE]\n\n";
    for (text, kind) in [
        (chunk.to_owned(), FailureKind::NoDone),
        (String::new(), FailureKind::NoDone),
        (format!("{chunk}data: [DONE]"), FailureKind::NoDone),
        (format!("{chunk}{done}{chunk}"), FailureKind::DataAfterDone),
        (format!("{chunk}{done}data: x"), FailureKind::DataAfterDone),
        (
            format!("{chunk}data: {{\"error\":{{\"message\":\"m\"}}}}\n\n{done}"),
            FailureKind::ErrorIn200,
        ),
        (
            format!("data: {{\"object\":\"error\",\"message\":\"m\"}}\n\n{done}"),
            FailureKind::ErrorIn200,
        ),
        (
            format!("data: {{\"choices\":[\n\n{done}"),
            FailureKind::BadJson,
        ),
        (
            format!("data: {{'error': 1}}\n\n{done}"),
            FailureKind::BadJson,
        ),
    ] {
        assert_eq!(whole(&text), Err(kind), "{text}");
    }
}

#[test]
fn an_event_without_end_is_refused() {
    let mut stream = EventStream::default();
    let piece = vec![b'x'; 1 << 20];
    let failure = (0..8)
        .find_map(|_| stream.push(&piece).err())
        .expect("a limit");
    assert_eq!(failure.kind, FailureKind::TooLong);
}

#[test]
fn a_plain_answer_with_an_error_inside_is_no_success() {
    let failure = plain(b"{\"error\":{\"message\":\"m\"}}").expect_err("an error");
    assert_eq!(failure.kind, FailureKind::ErrorIn200);
    let counts = plain(
        b"{\"choices\":[{\"message\":{\"role\":\"assistant\",\"content\":\"hi\"},\"finish_reason\":\"stop\"}],\
          \"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2},\"error\":null}",
    );
    assert_eq!(counts.expect("an answer").tokens(), 2);
}
