//! The attribute macro of burn-lean-quant; use it from there.

use proc_macro::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::visit_mut::{self, VisitMut};
use syn::{
    Expr, ExprMethodCall, ImplItemFn, ItemImpl, Path, Token, parse_macro_input, parse_quote,
};

/// Lets the layers that are called in an `impl` block quantize their activations.
///
/// Every call `layer.forward(..)` in the block becomes `layer.forward_q(..)` where the layer is one
/// that has quantizers (see `ForwardQ`), itself or behind references, and stays as it is for
/// everything else: activations, norms, modules of your own. Nothing else changes; in a model that
/// is not prepared, nothing changes at all.
///
/// Not seen: calls inside of other macros (`vec![..]`), calls of a layer behind a `Box` or another
/// smart pointer (write `(*layer).forward(x)`), and layers that are called in another `impl` block
/// without the attribute. Attention, transformer encoders and decoders take the crate's own
/// `MhaInput`, `TransformerEncoderInput` and `TransformerDecoderInput`: import these instead of
/// Burn's. A `forward` that takes `&mut self`
/// does not compile in such a block.
///
/// Where the crate is only reachable by another path, name it:
/// `#[quantize_calls(crate = burn_lean::quant)]`.
///
/// # Panics
///
/// The calls panic where `ForwardQ::forward_q` does: for a scheme that does not fit the shape of an
/// activation.
#[proc_macro_attribute]
pub fn quantize_calls(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let Arguments { path } = parse_macro_input!(arguments as Arguments);
    let mut block = parse_macro_input!(item as ItemImpl);
    let mut calls = Calls { path, found: false };
    calls.visit_item_impl_mut(&mut block);
    quote!(#block).into()
}

/// `crate = path`, or nothing.
struct Arguments {
    path: Path,
}

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.is_empty() {
            let path = parse_quote!(::burn_lean_quant);
            return Ok(Self { path });
        }
        input.parse::<Token![crate]>()?;
        input.parse::<Token![=]>()?;
        let path = input.call(Path::parse_mod_style)?;
        Ok(Self { path })
    }
}

/// Puts two references before the receiver of `forward`.
struct Calls {
    path: Path,
    /// Whether there was a call since it was last asked.
    found: bool,
}

impl VisitMut for Calls {
    fn visit_impl_item_fn_mut(&mut self, function: &mut ImplItemFn) {
        visit_mut::visit_impl_item_fn_mut(self, function);
        if std::mem::take(&mut self.found) {
            let path = &self.path;
            // Which of them a call is of, only its receiver's type tells.
            let import = parse_quote! {
                #[allow(unused_imports)]
                use #path::{
                    ForwardOfEncoderLayer as _, ForwardOfOneInput as _, ForwardOfSequence as _,
                };
            };
            function.block.stmts.insert(0, import);
        }
    }

    fn visit_expr_method_call_mut(&mut self, call: &mut ExprMethodCall) {
        visit_mut::visit_expr_method_call_mut(self, call);
        if call.method == "forward" {
            let receiver = &call.receiver;
            // Method lookup comes by `&&Layer`, where the traits above are, before `&Layer`.
            let reference: Expr = parse_quote!((&&(#receiver)));
            *call.receiver = reference;
            self.found = true;
        }
    }
}
