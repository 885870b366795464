//! The part of protobuf's wire format that ONNX files are written in.
//!
//! A message is a sequence of fields; each is a key, `number << 3 | wire type`, and a value: a
//! varint (wire type 0), bytes with their length (2), or 32 bits (5).

/// A message under construction.
#[derive(Debug, Default, Clone)]
pub(crate) struct Message(Vec<u8>);

const VARINT: u64 = 0;
const BYTES: u64 = 2;
const BITS_32: u64 = 5;

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, number: u32, wire_type: u64) {
        self.varint(u64::from(number) << 3 | wire_type);
    }

    /// Also for enums; negative numbers take ten bytes.
    pub(crate) fn int(&mut self, number: u32, value: i64) {
        self.key(number, VARINT);
        self.varint(value as u64);
    }

    pub(crate) fn float(&mut self, number: u32, value: f32) {
        self.key(number, BITS_32);
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, number: u32, value: &[u8]) {
        self.length(number, value.len());
        self.0.extend(value);
    }

    /// What stands before so many bytes, which follow.
    pub(crate) fn length(&mut self, number: u32, bytes: usize) {
        self.key(number, BYTES);
        self.varint(bytes as u64);
    }

    /// A message that ends with others, each of two parts: large bytes are copied once, to where they stay.
    pub(crate) fn ending(
        &mut self,
        number: u32,
        begin: &Message,
        of_each: u32,
        each: &[(Message, &[u8])],
    ) {
        let with_lengths = each.iter().map(|(head, bytes)| {
            let mut length = Message::default();
            length.length(of_each, head.0.len() + bytes.len());
            (length, head, bytes)
        });
        let parts: Vec<_> = with_lengths.collect();
        let of_parts = |(length, head, bytes): &(Message, &Message, &&[u8])| {
            length.0.len() + head.0.len() + bytes.len()
        };
        let total = begin.0.len() + parts.iter().map(of_parts).sum::<usize>();
        // And the key, the length, and what follows.
        self.0.reserve_exact(total + 64);
        self.length(number, total);
        self.0.extend(&begin.0);
        for (length, head, bytes) in parts {
            self.0.extend(length.0);
            self.0.extend(&head.0);
            self.0.extend(*bytes);
        }
    }

    pub(crate) fn text(&mut self, number: u32, value: &str) {
        self.bytes(number, value.as_bytes());
    }

    pub(crate) fn message(&mut self, number: u32, value: &Message) {
        self.bytes(number, &value.0);
    }

    /// A list, number by number, as ONNX's schema (proto2) has them.
    pub(crate) fn ints(&mut self, number: u32, values: impl IntoIterator<Item = i64>) {
        for value in values {
            self.int(number, value);
        }
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::Message;

    #[test]
    fn fields_are_encoded_as_the_specification_shows() {
        // The examples of https://protobuf.dev/programming-guides/encoding/.
        let mut message = Message::default();
        message.int(1, 150);
        message.text(2, "testing");
        let mut outer = Message::default();
        outer.message(3, &message);
        let inner = [
            0x08, 0x96, 0x01, 0x12, 7, b't', b'e', b's', b't', b'i', b'n', b'g',
        ];
        assert_eq!(outer.into_bytes(), [&[0x1a, 12], &inner[..]].concat());
        // The second field in two parts, at the end.
        let mut first = Message::default();
        first.int(1, 150);
        let mut head = Message::default();
        head.int(1, 8);
        head.length(2, 300);
        let bytes = [7; 300];
        let mut whole = Message::default();
        let mut second = Message::default();
        second.int(1, 8);
        second.bytes(2, &bytes);
        let mut parts = first.clone();
        parts.message(5, &second);
        whole.message(7, &parts);
        let mut ending = Message::default();
        ending.ending(7, &first, 5, &[(head, &bytes)]);
        assert_eq!(ending.into_bytes(), whole.into_bytes());
        let mut list = Message::default();
        list.ints(6, [3, 270]);
        assert_eq!(list.into_bytes(), [0x30, 0x03, 0x30, 0x8e, 0x02]);
        let mut negative = Message::default();
        negative.int(1, -1);
        assert_eq!(negative.into_bytes().len(), 11);
    }
}
