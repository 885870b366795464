//! Names, axes and packed codes.

use burn_lean_reparam::Trail;

pub(super) use crate::codes::quantized_tensor::transposed as turn;

/// What a float tensor of a model is called in the file, and how it lies there.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place {
    /// Path of the module that holds it.
    pub(super) layer: String,
    /// `weight`, `bias`…
    pub(super) name: String,
    /// A matrix of Burn's linear layer: outputs come first in the file.
    pub(super) turned: bool,
}

impl Place {
    /// Of a tensor of this rank.
    pub(super) fn at(trail: &Trail, rank: usize) -> Self {
        Self::of(trail.names(), trail.container(), rank)
    }

    /// Of the tensor at `path`, in a struct of this name.
    fn of(path: &[String], container: &str, rank: usize) -> Self {
        let (name, layer) = match path.split_last() {
            Some((name, layer)) => (name.as_str(), layer.join(".")),
            None => ("", String::new()),
        };
        let normalizes = matches!(
            container,
            "Struct:BatchNorm"
                | "Struct:LayerNorm"
                | "Struct:GroupNorm"
                | "Struct:InstanceNorm"
                | "Struct:RmsNorm"
        );
        let name = match (normalizes, name) {
            (true, "gamma") => "weight",
            (true, "beta") => "bias",
            _ => name,
        };
        Self {
            layer,
            name: name.into(),
            turned: container == "Struct:Linear" && name == "weight" && rank == 2,
        }
    }

    /// The name of a tensor of this place: `P.weight`, or `P.weight_scale` for `_scale`.
    pub(super) fn with(&self, suffix: &str) -> String {
        self.in_layer(&format!("{}{suffix}", self.name))
    }

    /// The name of a tensor of its layer.
    pub(super) fn in_layer(&self, name: &str) -> String {
        match self.layer.is_empty() {
            true => name.to_string(),
            false => format!("{}.{name}", self.layer),
        }
    }
}

/// Codes of `[rows, columns]` as words, each row by itself: plus 2ᵇ⁻¹, low bits first.
pub(super) fn pack(codes: &[i32], columns: usize, bits: u8) -> Vec<i32> {
    let (factor, offset) = (32 / usize::from(bits), 1_i32 << (bits - 1));
    let rows = codes.chunks(columns.max(1));
    let words = rows.flat_map(|row| {
        row.chunks(factor).map(|part| {
            let places = part.iter().enumerate();
            let word = places.fold(0_u32, |word, (at, code)| {
                word | ((code + offset) as u32) << (at * usize::from(bits))
            });
            word as i32
        })
    });
    words.collect()
}

/// Words that a row of codes takes.
pub(super) fn words(columns: usize, bits: u8) -> usize {
    columns.div_ceil(32 / usize::from(bits))
}

/// The inverse of [`pack`], of as many words as it makes.
pub(super) fn unpack(packed: &[i32], columns: usize, bits: u8) -> Vec<i32> {
    let (factor, offset) = (32 / usize::from(bits), 1_i32 << (bits - 1));
    let mask = (1_u32 << bits) - 1;
    let rows = packed.chunks(words(columns, bits).max(1));
    let codes = rows.flat_map(|row| {
        (0..columns).map(move |column| {
            let word = row[column / factor] as u32 >> (column % factor * usize::from(bits));
            (word & mask) as i32 - offset
        })
    });
    codes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_every_width_survives_packing() {
        for bits in 2..=8_u8 {
            let lowest = -(1_i32 << (bits - 1));
            for columns in [1, 3, 8, 21] {
                let codes: Vec<i32> = (0..3 * columns as i32)
                    .map(|index| lowest + index * 7 % (1 << bits))
                    .collect();
                let packed = pack(&codes, columns, bits);
                assert_eq!(packed.len(), 3 * words(columns, bits));
                assert_eq!(unpack(&packed, columns, bits), codes, "{bits} bits");
            }
        }
    }

    #[test]
    fn words_are_those_of_the_layout() {
        // As the documentation of its packing has it: 1 and 2 become 129 and 130, which are 33409.
        assert_eq!(pack(&[1, 2], 2, 8), [33409]);
        assert_eq!(pack(&[-8, 7, 0], 3, 4), [0x8f0]);
    }

    #[test]
    fn matrices_of_linear_layers_and_names_of_norms_are_pytorchs() {
        let path = |path: &str| -> Vec<String> { path.split('.').map(Into::into).collect() };
        let place = Place::of(&path("a.fc.weight"), "Struct:Linear", 2);
        assert_eq!(
            (place.with("_scale"), place.turned),
            ("a.fc.weight_scale".into(), true)
        );
        let place = Place::of(&path("norm.gamma"), "Struct:LayerNorm", 1);
        assert_eq!(
            (place.with(""), place.turned),
            ("norm.weight".into(), false)
        );
        let place = Place::of(&path("weight"), "Struct:Linear", 2);
        assert_eq!(place.in_layer("input_scale"), "input_scale");
        let place = Place::of(&path("mine.gamma"), "Struct:Mine", 1);
        assert_eq!(place.with(""), "mine.gamma");
    }
}
