//! Operations that all kinds of tensors have.

use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, Shape, Slice};
use burn::tensor::{Device, FloatDType, IndexingUpdateOp, IntDType, TensorData};

use super::{CAPTURE, Map, Recording, bools, check, floats, indices, ints, read, upload};

/// Every second row from the back, and all but the first column.
fn slices() -> [Slice; 2] {
    [Slice::new(0, None, -2), Slice::new(1, None, 1)]
}

/// The same calls for a kind of tensor.
macro_rules! moves {
    ($kind:literal, $data:ident, $reshape:ident $expand:ident $swap_dims:ident $permute:ident
     $flip:ident $unfold:ident $slice:ident $slice_assign:ident
     $mask_where:ident $mask_fill:ident $repeat_dim:ident $cat:ident, $fill:expr) => {
        let named = |name: &str| format!("{} {name}", $kind);
        let check_1 = |name: &str, f: fn(DispatchTensor) -> DispatchTensor| {
            check(&named(name), [$data([4, 3])], |[x]| f(x));
        };
        check_1("reshape", |x| Dispatch::$reshape(x, Shape::new([2, 6])));
        check_1("swap_dims", |x| Dispatch::$swap_dims(x, 0, 1));
        check_1("flip", |x| Dispatch::$flip(x, &[1]));
        check_1("unfold", |x| Dispatch::$unfold(x, 0, 2, 2));
        check_1("slice", |x| Dispatch::$slice(x, &slices()));
        check_1("repeat_dim", |x| Dispatch::$repeat_dim(x, 1, 3));
        check_1("cat", |x| Dispatch::$cat(vec![x.clone(), x.clone(), x], 1));
        check(&named("expand"), [$data([1, 3])], |[x]| {
            Dispatch::$expand(x, Shape::new([2, 3]))
        });
        check(&named("permute"), [$data([2, 3, 4])], |[x]| {
            Dispatch::$permute(x, &[2, 0, 1])
        });
        check(
            &named("slice_assign"),
            [$data([4, 3]), $data([2, 2])],
            |[x, value]| {
                let ranges = [Slice::new(0, None, 2), Slice::new(1, None, 1)];
                Dispatch::$slice_assign(x, &ranges, value)
            },
        );
        check(
            &named("mask_where"),
            [$data([4, 3]), bools([4, 3]), $data([4, 3])],
            |[x, mask, y]| {
                let y = Dispatch::$flip(y, &[0]);
                Dispatch::$mask_where(x, mask, y)
            },
        );
        check(
            &named("mask_fill"),
            [$data([4, 3]), bools([4, 3])],
            |[x, mask]| Dispatch::$mask_fill(x, mask, $fill.into()),
        );
    };
}

#[test]
fn floats_are_moved_as_recorded() {
    moves!("float", floats, float_reshape float_expand float_swap_dims float_permute float_flip
        float_unfold float_slice float_slice_assign float_mask_where
        float_mask_fill float_repeat_dim float_cat, 0.1f64);
}

#[test]
fn ints_are_moved_as_recorded() {
    moves!("int", ints, int_reshape int_expand int_swap_dims int_permute int_flip int_unfold
        int_slice int_slice_assign int_mask_where int_mask_fill int_repeat_dim
        int_cat, 16_777_217i64);
}

#[test]
fn bools_are_moved_as_recorded() {
    moves!("bool", bools, bool_reshape bool_expand bool_swap_dims bool_permute bool_flip bool_unfold
        bool_slice bool_slice_assign bool_mask_where bool_mask_fill
        bool_repeat_dim bool_cat, true);
}

#[test]
fn values_are_chosen_as_recorded() {
    check!("float select", [floats([4, 3]), indices([5], 3)] => |[x, i]| {
        Dispatch::float_select(x, 1, i)
    });
    check!("int select", [ints([4, 3]), indices([5], 4)] => |[x, i]| Dispatch::int_select(x, 0, i));
    check!("float gather", [floats([4, 3]), indices([4, 5], 3)] => |[x, i]| {
        Dispatch::float_gather(1, x, i)
    });
    check!("int gather", [ints([4, 3]), indices([2, 3], 4)] => |[x, i]| {
        Dispatch::int_gather(0, x, i)
    });
}

#[test]
fn chosen_bools_are_bools() {
    let inputs = [bools([4, 3]), indices([5], 3), indices([4, 2], 3)];
    let recording = CAPTURE.with(|capture| {
        Recording::new(capture, &inputs, |[x, line, table]| {
            (
                Dispatch::bool_select(x.clone(), 1, line),
                Dispatch::bool_gather(1, x, table),
            )
        })
    });
    assert_eq!(
        recording.names(),
        ["bool gather", "bool select"].map(String::from).into()
    );
    let flex = Device::flex();
    let [x, line, table] = inputs.map(|data| upload(data, &flex));
    let operands = vec![x.clone(), line.clone(), table.clone()];
    let got = recording.execute(&mut Map::new(&flex), operands);
    // Flex itself makes bytes of them: here they go through ints.
    let x = Dispatch::bool_into_int(x, IntDType::I32);
    let chosen = [
        Dispatch::int_select(x.clone(), 1, line),
        Dispatch::int_gather(1, x, table),
    ];
    let native = flex.settings().bool_dtype;
    for (got, want) in got.into_iter().zip(chosen) {
        assert_eq!(
            read(got),
            read(Dispatch::int_equal_elem(want, 1i64.into(), native))
        );
    }
}

#[test]
fn values_are_written_to_places_as_recorded() {
    use IndexingUpdateOp::{Add, Assign, Max};
    let inputs = || [floats([4, 3]), indices([2, 3], 4), floats([2, 3])];
    for update in [Add, Assign] {
        check!("float scatter", inputs() => |[x, i, value]| {
            Dispatch::float_scatter(0, x, i, value, update)
        });
    }
    check!("float select_assign", [floats([4, 3]), indices([2], 4), floats([2, 3])] => |[x, i, v]| {
        Dispatch::float_select_assign(x, 0, i, v, Add)
    });
    for update in [Add, Assign, Max] {
        let inputs = [floats([4, 3]), indices([2, 1], 4), floats([2, 3])];
        check!("float scatter_nd", inputs => |[x, i, values]| {
            Dispatch::float_scatter_nd(x, i, values, update)
        });
    }
    check!("float gather_nd", [floats([4, 3]), indices([5, 2], 3)] => |[x, i]| {
        Dispatch::float_gather_nd(x, i)
    });
    check!("int scatter", [ints([4, 3]), indices([2, 3], 4), ints([2, 3])] => |[x, i, value]| {
        Dispatch::int_scatter(0, x, i, value, Add)
    });
    check!("int select_assign", [ints([4, 3]), indices([2], 4), ints([2, 3])] => |[x, i, v]| {
        Dispatch::int_select_assign(x, 0, i, v, Add)
    });
    check!("int scatter_nd", [ints([4, 3]), indices([2, 1], 4), ints([2, 3])] => |[x, i, v]| {
        Dispatch::int_scatter_nd(x, i, v, Add)
    });
    check!("int gather_nd", [ints([4, 3]), indices([5, 2], 3)] => |[x, i]| {
        Dispatch::int_gather_nd(x, i)
    });
    check!("bool scatter", [bools([4, 3]), indices([2, 3], 4), bools([2, 3])] => |[x, i, value]| {
        Dispatch::bool_scatter_or(0, x, i, value)
    });
    check!("bool select_assign", [bools([4, 3]), indices([2], 4), bools([2, 3])] => |[x, i, v]| {
        Dispatch::bool_select_or(x, 0, i, v)
    });
}

#[test]
fn equality_is_as_recorded() {
    let native = Device::flex().settings().bool_dtype;
    // Half of them equal.
    let pair = || [indices([4, 3], 2), indices([3, 4], 2)];
    check!("int equal", pair() => |[x, y]| {
        Dispatch::int_equal(x, Dispatch::int_reshape(y, Shape::new([4, 3])), native)
    });
    check!("int not_equal", pair() => |[x, y]| {
        Dispatch::int_not_equal(x, Dispatch::int_swap_dims(y, 0, 1), native)
    });
    // One more than a float of 32 bits would tell from its neighbour.
    let near = || [TensorData::from([16_777_216i32, 16_777_217, 16_777_218])];
    check!("int equal_elem", near() => |[x]| {
        Dispatch::int_equal_elem(x, 16_777_217i64.into(), native)
    });
    check!("int not_equal_elem", near() => |[x]| {
        Dispatch::int_not_equal_elem(x, 16_777_217i64.into(), native)
    });
    let pair = || [floats([4, 3]), floats([4, 3])];
    check!("float equal", pair() => |[x, y]| {
        Dispatch::float_equal(x, Dispatch::float_flip(y, &[1]), native)
    });
    check!("float not_equal", pair() => |[x, y]| {
        Dispatch::float_not_equal(x, Dispatch::float_flip(y, &[1]), native)
    });
    let three = || [TensorData::from([0.1f32, 0.2, 0.3])];
    check!("float equal_elem", three() => |[x]| {
        Dispatch::float_equal_elem(x, 0.5f64.into(), native)
    });
    check!("float not_equal_elem", three() => |[x]| {
        Dispatch::float_not_equal_elem(x, 0.5f64.into(), native)
    });
    check!("bool equal", [bools([4, 3]), bools([4, 3])] => |[x, y]| {
        Dispatch::bool_equal(x, Dispatch::bool_flip(y, &[0]))
    });
    check!("bool not_equal", [bools([4, 3]), bools([4, 3])] => |[x, y]| {
        Dispatch::bool_not_equal(x, Dispatch::bool_flip(y, &[0]))
    });
    check!("bool equal_elem", [bools([4, 3])] => |[x]| Dispatch::bool_equal_elem(x, false.into()));
    check!("bool not_equal_elem", [bools([4, 3])] => |[x]| {
        Dispatch::bool_not_equal_elem(x, false.into())
    });
}

#[test]
fn tests_of_all_and_any_are_as_recorded() {
    let native = Device::flex().settings().bool_dtype;
    let zeros = || indices([4, 2], 3);
    check!("int all", [zeros()] => |[x]| Dispatch::int_all(x, native));
    check!("int any", [zeros()] => |[x]| Dispatch::int_any(x, native));
    check!("int all_dim", [zeros()] => |[x]| Dispatch::int_all_dim(x, 1, native));
    check!("int any_dim", [zeros()] => |[x]| Dispatch::int_any_dim(x, 0, native));
    let float = |x| Dispatch::int_into_float(x, FloatDType::F32);
    check!("float all", [zeros()] => |[x]| Dispatch::float_all(float(x), native));
    check!("float any", [zeros()] => |[x]| Dispatch::float_any(float(x), native));
    check!("float all_dim", [zeros()] => |[x]| Dispatch::float_all_dim(float(x), 1, native));
    check!("float any_dim", [zeros()] => |[x]| Dispatch::float_any_dim(float(x), 0, native));
    check!("bool all", [bools([4, 2])] => |[x]| Dispatch::bool_all(x));
    check!("bool any", [bools([4, 2])] => |[x]| Dispatch::bool_any(x));
    check!("bool all_dim", [bools([4, 2])] => |[x]| Dispatch::bool_all_dim(x, 1));
    check!("bool any_dim", [bools([4, 2])] => |[x]| Dispatch::bool_any_dim(x, 0));
}

#[test]
fn casts_are_as_recorded() {
    check!("float cast", [floats([4, 3])] => |[x]| Dispatch::float_cast(x, FloatDType::F16));
    check!("int cast", [ints([4, 3])] => |[x]| Dispatch::int_cast(x, IntDType::I64));
    check!("int cast", [indices([4, 3], 100)] => |[x]| Dispatch::int_cast(x, IntDType::U8));
}
