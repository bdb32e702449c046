/** Ledger: the place of a view that is not written yet. */
import { replace } from "../lib/dom.js";
import { empty } from "../lib/states.js";

/** @type {import("../lib/context.js").View} */
export const ledgerView = {
  title: () => "Ledger",
  async show(root) {
    replace(root, empty("This view is not here yet."));
  },
};
