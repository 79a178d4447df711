// Runs the code of a client in this process, and writes the value of its last expression, or the error that ends it, to
// `report.json`.
//
// The code is a script first, because only a script has a value. Code that is no script but may be a module, such as one
// with `import` or with `await` outside of functions, is imported instead and has no value.

'use strict';

const fs = require('fs');
const path = require('path');
const util = require('util');
const vm = require('vm');
const { createRequire } = require('module');
const { pathToFileURL } = require('url');

const MAX_TEXT = 1 << 20;
const own = __dirname;
const directory = path.dirname(own);
const main = path.join(directory, 'index.js');
const report = {};

const save = () => {
  try {
    fs.writeFileSync(path.join(own, 'report.json'), JSON.stringify(report));
  } catch {
    // The code may have removed the directory.
  }
};

const describe = (error) => {
  const isError = error instanceof Error || (error !== null && typeof error === 'object' && 'stack' in error);
  const text = (value) => String(value).slice(0, MAX_TEXT);
  return isError
    ? { ename: text(error.name), evalue: text(error.message), traceback: text(error.stack).split('\n') }
    : { ename: 'Error', evalue: text(util.inspect(error)), traceback: [text(util.inspect(error))] };
};

// A monitor does not change what happens: Node.js prints the error and exits.
process.on('uncaughtExceptionMonitor', (error) => {
  try {
    report.error = describe(error);
  } catch {
    report.error = { ename: 'Error', evalue: '', traceback: [] };
  }
  save();
});

save();
const code = fs.readFileSync(path.join(own, 'code.js'), 'utf8');
process.argv.splice(1, 1, main);
const define = (name, value) =>
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true });
define('require', createRequire(main));
define('module', { exports: {}, id: '.', filename: main, paths: [] });
define('exports', module.exports);
define('__filename', main);
define('__dirname', directory);

let script;
try {
  const loader = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
  script = new vm.Script(code, { filename: main, importModuleDynamically: loader });
} catch (error) {
  if (!/\b(import|export|await)\b/.test(code)) throw error;
}
if (script) {
  const value = script.runInThisContext();
  const isPromise = util.types.isPromise(value);
  if (value !== undefined && !isPromise) {
    report.result = util.inspect(value, { maxStringLength: 1 << 17, maxArrayLength: 1000 }).slice(0, MAX_TEXT);
    save();
  }
} else {
  const file = path.join(directory, 'index.mjs');
  fs.writeFileSync(file, code);
  // An error of the module is an unhandled rejection, which ends the process like an exception.
  import(pathToFileURL(file).href);
}
