//! Names, axes and packed codes.

use burn_lean_reparam::{Trail, bits};

pub(super) use crate::codes::quantized_tensor::transposed as turn;

/// What a float tensor of a model is called in the file, and how it lies there.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place {
    /// Path of the module that holds it.
    pub(super) layer: String,
    /// `weight`, `bias`…
    pub(super) name: String,
    /// Of the module that holds it: `Linear`, `Embedding`…
    pub(super) class: String,
    /// A matrix of Burn's linear layer: outputs come first in the file.
    pub(super) turned: bool,
}

/// From the name of a tensor of a model, with PyTorch's names of layers' parameters, to that in a file.
pub(super) type Names<'a> = &'a dyn Fn(&str) -> String;

impl Place {
    /// Of a tensor of this rank.
    pub(super) fn at(trail: &Trail, rank: usize, names: Names<'_>) -> Self {
        let place = Self::of(trail.names(), trail.container(), rank);
        let name = names(&place.with(""));
        let (layer, name) = name.rsplit_once('.').unwrap_or(("", &name));
        Self {
            layer: layer.into(),
            name: name.into(),
            ..place
        }
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
        let class = container.strip_prefix("Struct:").unwrap_or(container);
        Self {
            layer,
            name: name.into(),
            class: class.into(),
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

/// Row-major `[columns, rows]` of the bytes of elements from row-major `[rows, columns]`, each of `width` bytes.
///
/// Tile by tile, into the one buffer that comes back: the head of a large model is gigabytes, and a slice for each
/// element would take four times as much.
pub(super) fn turn_bytes(bytes: &[u8], width: usize, rows: usize, columns: usize) -> Vec<u8> {
    const TILE: usize = 32;
    let mut turned = vec![0; bytes.len()];
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    let from = width * (row * columns + column);
                    let to = width * (column * rows + row);
                    turned[to..to + width].copy_from_slice(&bytes[from..from + width]);
                }
            }
        }
    }
    turned
}

/// Codes of `[rows, columns]` as words, each row by itself: plus 2ᵇ⁻¹, low bits first, without a gap.
pub(super) fn pack(codes: &[i32], columns: usize, bits: u8) -> Vec<i32> {
    let offset = 1_i32 << (bits - 1);
    let rows = codes.chunks(columns.max(1));
    let words = rows.flat_map(|row| {
        let mut bytes = bits::pack(row.iter().map(|code| (code + offset) as u8), bits);
        bytes.resize(4 * words(columns, bits), 0);
        let words = bytes.chunks_exact(4);
        let words = words.map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        words.collect::<Vec<i32>>()
    });
    words.collect()
}

/// Words that a row of codes takes.
pub(super) fn words(columns: usize, bits: u8) -> usize {
    (columns * usize::from(bits)).div_ceil(32)
}

/// How the codes of a row lie in its words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Packing {
    /// As [`pack`] has them, and compressed-tensors since 0.18.
    Dense,
    /// As many as a word holds whole, which is what was before: another one for 3, 5, 6 and 7 bits.
    Whole,
}

impl Packing {
    /// That of a row of `columns` codes in so many words; `is_dense` says which where both take as many.
    pub(super) fn of(found: usize, columns: usize, bits: u8, is_dense: bool) -> Option<Self> {
        let fits = |packing: &Self| packing.words(columns, bits) == found;
        match is_dense {
            true => [Self::Dense, Self::Whole].into_iter().find(fits),
            false => [Self::Whole, Self::Dense].into_iter().find(fits),
        }
    }

    fn words(self, columns: usize, bits: u8) -> usize {
        match self {
            Self::Dense => words(columns, bits),
            Self::Whole => columns.div_ceil(32 / usize::from(bits)),
        }
    }

    /// Codes of rows of so many words each.
    pub(super) fn unpack(self, packed: &[i32], columns: usize, bits: u8) -> Vec<i32> {
        let offset = 1_i32 << (bits - 1);
        let rows = packed.chunks(self.words(columns, bits).max(1));
        let codes = rows.flat_map(|row| -> Vec<u8> {
            match self {
                Self::Dense => {
                    let bytes: Vec<u8> = row.iter().flat_map(|word| word.to_le_bytes()).collect();
                    let length = bits::packed_len(columns, bits);
                    bits::unpack(&bytes[..length], bits, columns).unwrap_or_default()
                }
                Self::Whole => {
                    let (whole, mask) = (32 / usize::from(bits), (1_u32 << bits) - 1);
                    let code =
                        |at: usize| row[at / whole] as u32 >> (at % whole * usize::from(bits));
                    (0..columns).map(|at| (code(at) & mask) as u8).collect()
                }
            }
        });
        codes.map(|code| i32::from(code) - offset).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_every_width_are_turned_as_numbers_are() {
        for (rows, columns) in [(1, 1), (3, 70), (33, 32), (65, 31), (0, 4)] {
            let numbers: Vec<u64> = (0..(rows * columns) as u64).collect();
            let turned = turn(&numbers, rows, columns);
            for width in [1, 2, 4, 8] {
                let bytes = |numbers: &[u64]| -> Vec<u8> {
                    let of = numbers
                        .iter()
                        .map(|number| number.wrapping_mul(0x0101_0307_0b0d_1113));
                    of.flat_map(|number| number.to_le_bytes()[..width].to_vec())
                        .collect()
                };
                let found = turn_bytes(&bytes(&numbers), width, rows, columns);
                assert_eq!(found, bytes(&turned), "{rows} × {columns} of {width} bytes");
            }
        }
    }

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
                let packing = Packing::of(words(columns, bits), columns, bits, true).unwrap();
                assert_eq!(packing.unpack(&packed, columns, bits), codes, "{bits} bits");
            }
        }
    }

    #[test]
    fn words_of_whole_codes_are_read_as_well() {
        // Ten codes of 3 bits in a word, the eleventh in the next, where dense codes go on in the first.
        let codes: Vec<i32> = (0..11).map(|index| index % 8 - 4).collect();
        let first = codes[..10].iter().enumerate();
        let first = first.fold(0, |word, (at, code)| word | (code + 4) << (3 * at));
        let packed = [first, codes[10] + 4];
        let packing = Packing::of(2, 11, 3, false).unwrap();
        assert_eq!(packing, Packing::Whole);
        assert_eq!(packing.unpack(&packed, 11, 3), codes);
        assert_eq!(Packing::of(2, 11, 3, true), Some(Packing::Dense));
        // Where the number of words differs it alone decides: 64 codes of 3 bits are 6 words, or 7 of ten.
        for is_dense in [true, false] {
            assert_eq!(Packing::of(6, 64, 3, is_dense), Some(Packing::Dense));
            assert_eq!(Packing::of(7, 64, 3, is_dense), Some(Packing::Whole));
        }
        assert_eq!(Packing::of(4, 8, 4, true), None);
    }

    #[test]
    fn words_are_those_of_the_layout() {
        // As the documentation of its packing has it: 1 and 2 become 129 and 130, which are 33409.
        assert_eq!(pack(&[1, 2], 2, 8), [33409]);
        assert_eq!(pack(&[-8, 7, 0], 3, 4), [0x8f0]);
        // The eleventh code of 3 bits begins in the last two bits of the first word.
        let mut codes = [-4; 11];
        codes[10] = 3;
        assert_eq!(pack(&codes, 11, 3), [-0x4000_0000, 1]);
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
