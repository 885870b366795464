//! Where the sequences come from: made up, or windows of a text.

use std::path::Path;

use rand::RngExt;
use rand::rngs::StdRng;

/// Sequences of tokens below the size of the vocabulary.
#[derive(Debug)]
pub(crate) enum Source {
    /// Every token is as likely as any other.
    Random { vocabulary: usize },
    /// Windows of a text, as tokens: its most frequent bytes, and one for all others.
    Text { tokens: Vec<i64> },
}

impl Source {
    /// The `.txt` files in `dir`, in the order of their names; without one, random tokens.
    pub(crate) fn load(
        dir: Option<&Path>,
        vocabulary: usize,
        length: usize,
    ) -> Result<Self, String> {
        let Some(dir) = dir else {
            return Ok(Self::Random { vocabulary });
        };
        let unreadable = |error| format!("cannot read {}: {error}", dir.display());
        let mut files: Vec<_> = std::fs::read_dir(dir)
            .map_err(unreadable)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
            .collect();
        files.sort();
        let mut text = Vec::new();
        for file in files {
            text.extend(std::fs::read(file).map_err(unreadable)?);
        }
        if text.len() < length {
            return Err(format!(
                "the .txt files in {} have {} bytes, fewer than one sequence of {length}",
                dir.display(),
                text.len()
            ));
        }
        Ok(Self::Text {
            tokens: tokens(&text, vocabulary),
        })
    }

    /// One sequence.
    pub(crate) fn sequence(&self, length: usize, rng: &mut StdRng) -> Vec<i64> {
        match self {
            Self::Random { vocabulary } => (0..length)
                .map(|_| rng.random_range(0..*vocabulary as i64))
                .collect(),
            Self::Text { tokens } => {
                let start = rng.random_range(0..=tokens.len() - length);
                tokens[start..start + length].to_vec()
            }
        }
    }
}

fn tokens(text: &[u8], vocabulary: usize) -> Vec<i64> {
    let mut counts = [0usize; 256];
    for byte in text {
        counts[usize::from(*byte)] += 1;
    }
    let mut by_count: Vec<usize> = (0..256).collect();
    by_count.sort_by_key(|byte| (std::cmp::Reverse(counts[*byte]), *byte));
    let mut token = [0i64; 256];
    for (rank, byte) in by_count.into_iter().enumerate() {
        token[byte] = rank.min(vocabulary - 1) as i64;
    }
    text.iter().map(|byte| token[usize::from(*byte)]).collect()
}
