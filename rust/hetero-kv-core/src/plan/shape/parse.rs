//! The grammar of shapes.

use std::num::NonZeroU32;

use super::{EngineShape, GrammarError, InstanceShape, KvShape};

const SHAPE: &str =
    "[Nx]dp=D,tp=T[,pp=P] with numbers from 1 to 1024, such as dp=8,tp=1 or 2xdp=1,tp=8";
const KV: &str = "gqa:HEADS_TOTAL:HEAD_DIM or mla:LATENT, such as gqa:8:128 or mla:576";
const SHAPE_NUMBER_MAX: u32 = 1024;
const KV_NUMBER_MAX: u32 = 65_536;
/// Longest text looked at; every valid one is shorter.
const TEXT_BYTES_MAX: usize = 128;

pub(super) fn instance_shape(text: &str) -> Result<InstanceShape, GrammarError> {
    let fail = |problem: String| GrammarError {
        problem,
        expected: SHAPE,
    };
    bounded(text).map_err(fail)?;
    let (instances, pairs) = match text.split_once('x') {
        Some((count, pairs)) => (
            number("number of instances", count, SHAPE_NUMBER_MAX).map_err(fail)?,
            pairs,
        ),
        None => (1, text),
    };
    let (mut dp, mut tp, mut pp) = (None, None, None);
    for pair in pairs.split(',') {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(fail(format!("{pair:?} in {text:?} is not KEY=NUMBER")));
        };
        let slot = match key {
            "dp" => &mut dp,
            "tp" => &mut tp,
            "pp" => &mut pp,
            _ => return Err(fail(format!("unknown key {key:?} in {text:?}"))),
        };
        let value = number(key, value, SHAPE_NUMBER_MAX).map_err(fail)?;
        if slot.replace(value).is_some() {
            return Err(fail(format!("{key} is given twice in {text:?}")));
        }
    }
    let missing = |key: &str| fail(format!("{key} is missing in {text:?}"));
    Ok(InstanceShape {
        instances,
        engine: EngineShape {
            dp: dp.ok_or_else(|| missing("dp"))?,
            tp: tp.ok_or_else(|| missing("tp"))?,
            pp: pp.unwrap_or(1),
        },
    })
}

pub(super) fn kv_shape(text: &str) -> Result<KvShape, GrammarError> {
    let fail = |problem: String| GrammarError {
        problem,
        expected: KV,
    };
    bounded(text).map_err(fail)?;
    let count = |name: &str, value: &str| {
        let value = number(name, value, KV_NUMBER_MAX)?;
        NonZeroU32::new(value).ok_or_else(|| format!("{name} is 0"))
    };
    let mut fields = text.split(':');
    match (fields.next(), fields.next(), fields.next(), fields.next()) {
        (Some("gqa"), Some(heads), Some(head_dim), None) => Ok(KvShape::Grouped {
            heads: count("HEADS_TOTAL", heads).map_err(fail)?,
            head_dim: count("HEAD_DIM", head_dim).map_err(fail)?,
        }),
        (Some("mla"), Some(latent), None, _) => Ok(KvShape::Latent {
            latent: count("LATENT", latent).map_err(fail)?,
        }),
        _ => Err(fail(format!("{text:?} is no KV layout"))),
    }
}

fn bounded(text: &str) -> Result<(), String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("{} bytes are too many", text.len()));
    }
    Ok(())
}

fn number(name: &str, text: &str, max: u32) -> Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u32>() {
        Ok(value) if digits && (1..=max).contains(&value) => Ok(value),
        _ => Err(format!("{name} {text:?} is not a number from 1 to {max}")),
    }
}
