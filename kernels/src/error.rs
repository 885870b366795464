//! What cannot be packed.

/// Why a weight cannot be packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// As many numbers as the shape says are needed.
    #[error("{what}: expected {expected} numbers, got {found}")]
    Length {
        /// Of what.
        what: &'static str,
        /// By the shape.
        expected: usize,
        /// As given.
        found: usize,
    },
    /// A code outside of the range of its bits.
    #[error("the code {code} does not fit {bits} signed bits: take 8 bits, or quantize to −8..7")]
    Code {
        /// The code.
        code: i32,
        /// Bits of a code.
        bits: u8,
    },
    /// Codes of a width that is not packed.
    #[error("codes of {bits} bits are not packed: take 4 or 8")]
    Bits {
        /// Bits of a code.
        bits: u8,
    },
    /// Sums of a column that may leave 32 bits.
    #[error(
        "the sums of column {column} may reach {sum}, more than 32 bits hold beside a bias: multiply in \
         floats"
    )]
    Overflow {
        /// The column.
        column: usize,
        /// The largest sum that inputs of 8 bits can make.
        sum: i64,
    },
    /// Blocks that do not divide the rows.
    #[error("blocks of {block} rows do not divide {rows} rows")]
    Block {
        /// Rows that share a scale.
        block: usize,
        /// Rows of the weight.
        rows: usize,
    },
    /// Several blocks of an odd number of rows, where codes are multiplied by codes: those are in pairs of rows.
    #[error(
        "several blocks need an even number of rows each, to multiply by codes: {block} is odd"
    )]
    OddBlock {
        /// Rows that share a scale.
        block: usize,
    },
}

/// Whether codes are of 4 or 8 bits.
pub(crate) fn expect_bits(codes: &[i8], bits: u8) -> Result<(), KernelError> {
    let outside = |code: &&i8| bits == 4 && !(-8..8).contains(*code);
    match (bits, codes.iter().find(outside)) {
        (4 | 8, None) => Ok(()),
        (4 | 8, Some(code)) => Err(KernelError::Code {
            code: i32::from(*code),
            bits,
        }),
        _ => Err(KernelError::Bits { bits }),
    }
}

pub(crate) fn expect(what: &'static str, expected: usize, found: usize) -> Result<(), KernelError> {
    match expected == found {
        true => Ok(()),
        false => Err(KernelError::Length {
            what,
            expected,
            found,
        }),
    }
}
