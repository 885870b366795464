//! Damaged copies of sound bytes: the same ones every time.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

/// What takes the place of a number or a word in a text.
const WORDS: [&str; 22] = [
    "0",
    "-1",
    "1",
    "255",
    "256",
    "65536",
    "4294967295",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "1e-400",
    "-0.0",
    "0.5",
    "nan",
    "inf",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"F16\"",
];

/// `count` damaged copies of `sound`.
pub(crate) fn damaged(sound: &[u8], seed: u64, count: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let sound = sound.to_vec();
    (0..count).map(move |_| {
        let mut bytes = sound.clone();
        // Mostly one thing at a time: the first thing that is wrong hides the others.
        for _ in 0..*[1, 1, 1, 2, 4].choose(&mut rng).unwrap_or(&1) {
            damage(&mut bytes, &mut rng);
        }
        bytes
    })
}

fn damage(bytes: &mut Vec<u8>, rng: &mut StdRng) {
    if bytes.is_empty() {
        bytes.push(rng.random());
        return;
    }
    let at = rng.random_range(0..bytes.len());
    match rng.random_range(0..10) {
        0 => bytes.truncate(at),
        1 => bytes[at] = rng.random(),
        2 | 3 => bytes[at] ^= 1 << rng.random_range(0..8),
        4 => {
            bytes.remove(at);
        }
        5 => bytes.insert(at, rng.random()),
        6 => {
            // Numbers that sizes and offsets are read from.
            let values = [
                0,
                1,
                0x7f,
                0x80,
                0xff,
                u64::from(u32::MAX),
                u64::MAX >> 1,
                u64::MAX,
            ];
            let value = *values.choose(rng).unwrap_or(&0);
            let width = *[1, 2, 4, 8].choose(rng).unwrap_or(&1);
            for (byte, new) in bytes[at..].iter_mut().zip(value.to_le_bytes()).take(width) {
                *byte = new;
            }
        }
        7 => {
            let end = (at + rng.random_range(1..32)).min(bytes.len());
            let part = bytes[at..end].to_vec();
            let to = rng.random_range(0..=bytes.len());
            bytes.splice(to..to, part);
        }
        _ => word(bytes, at, rng),
    }
}

/// Puts another word in the place of the one at or after `at`.
fn word(bytes: &mut Vec<u8>, at: usize, rng: &mut StdRng) {
    let of_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'+');
    let Some(start) = bytes[at..].iter().position(of_word) else {
        return;
    };
    let start = at + start;
    let length = bytes[start..]
        .iter()
        .take_while(|byte| of_word(byte))
        .count();
    let new = WORDS.choose(rng).unwrap_or(&"0");
    bytes.splice(start..start + length, new.bytes());
}
