//! What can be wrong with the bytes of a sparse record.

/// Why bytes are no sparse record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordFault {
    /// The first bytes are not those of a sparse record.
    #[error("it is no sparse record")]
    NotARecord,
    /// The version is another one.
    #[error("it has version {found}, this release reads {supported}")]
    Version {
        /// Version of the file.
        found: u32,
        /// Version that this release reads.
        supported: u32,
    },
    /// It was cut off, or something was appended.
    #[error("it has {found} bytes instead of {expected}: it was cut off or appended to")]
    Length {
        /// Bytes that it should have.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The checksum does not match: bytes were changed.
    #[error("its checksum is {found:08x} instead of {expected:08x}: it is damaged")]
    Checksum {
        /// Checksum in the file.
        expected: u32,
        /// Checksum of the bytes.
        found: u32,
    },
    /// The list of tensors cannot be read.
    #[error("its list of tensors cannot be read: {reason}")]
    Header {
        /// What is wrong with it.
        reason: String,
    },
    /// The bytes of a tensor contradict its entry in the list.
    #[error("tensor `{path}`: {reason}")]
    Tensor {
        /// Path of the parameter.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
}
