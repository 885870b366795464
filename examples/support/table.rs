//! A table for the terminal, which is also written as JSON.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

/// One entry.
#[derive(Debug, Clone)]
pub(crate) enum Cell {
    Text(String),
    /// A number and how many decimals of it are printed; JSON gets all.
    Number(f64, usize),
    Integer(u64),
    Flag(bool),
    /// Not known, or not applicable.
    Empty,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl Cell {
    /// A number that may not be known.
    pub(crate) fn optional(number: Option<f64>, decimals: usize) -> Self {
        number.map_or(Self::Empty, |number| Self::Number(number, decimals))
    }

    /// An integer that may not be known.
    pub(crate) fn optional_integer(integer: Option<u64>) -> Self {
        integer.map_or(Self::Empty, Self::Integer)
    }

    fn json(&self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            // JSON has no infinity and no NaN.
            Self::Number(number, _) if !number.is_finite() => json!(number.to_string()),
            // A sum of nothing is −0.
            Self::Number(number, _) => json!(number + 0.0),
            Self::Integer(integer) => json!(integer),
            Self::Flag(flag) => json!(flag),
            Self::Empty => Value::Null,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number, decimals) => write!(f, "{:.decimals$}", number + 0.0),
            Self::Integer(integer) => write!(f, "{integer}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Empty => f.write_str("-"),
        }
    }
}

/// Rows under a header; the first column is left-aligned, the others right-aligned.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    title: String,
    header: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, header: &[&'static str]) -> Self {
        Self {
            title: title.into(),
            header: header.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row with one cell per column.
    pub(crate) fn push(&mut self, row: impl IntoIterator<Item = Cell>) {
        let row: Vec<Cell> = row.into_iter().collect();
        assert_eq!(row.len(), self.header.len(), "one cell per column");
        self.rows.push(row);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Prints the table and, if `json` names a file, writes it there too.
    pub(crate) fn publish(&self, json: Option<&Path>) -> Result<(), String> {
        println!("\n{self}");
        let Some(path) = json else { return Ok(()) };
        let mut text = serde_json::to_string_pretty(&self.json()).expect("a table is valid JSON");
        text.push('\n');
        std::fs::write(path, text)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))
    }

    /// As [`publish`](Self::publish), into `STEM-name.json`: for programs with several tables.
    pub(crate) fn publish_as(&self, stem: Option<&Path>, name: &str) -> Result<(), String> {
        let path = stem.map(|stem| PathBuf::from(format!("{}-{name}.json", stem.display())));
        self.publish(path.as_deref())
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                let columns = self.header.iter().map(|name| name.to_string());
                Value::Object(
                    columns
                        .zip(row.iter().map(Cell::json))
                        .collect::<Map<_, _>>(),
                )
            })
            .collect();
        json!({ "title": self.title, "rows": rows })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        table.set_header(&self.header);
        table.add_rows(&self.rows);
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, 2));
            if index > 0 {
                column.set_cell_alignment(comfy_table::CellAlignment::Right);
            }
        }
        writeln!(f, "{}\n{}", self.title, table.trim_fmt())
    }
}
